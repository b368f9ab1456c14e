"""Readers of published formats, and batches whose position is one integer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "dataset": {
        "digits": "DigitsConfig",
        "mnist": "MnistConfig",
        "fashion_mnist": "FashionMnistConfig",
        "cifar10": "Cifar10Config",
        "image_folder": "ImageFolderConfig",
        "tar_images": "TarImagesConfig",
        "mixed_sizes": "MixedSizesConfig",
        "char_text": "CharTextConfig",
        "token_text": "TokenTextConfig",
        "masked_text": "MaskedTextConfig",
        "phantoms": "PhantomsConfig",
        "phantom_volumes": "PhantomVolumesConfig",
        "universes": "UniversesConfig",
        "mri_slices": "MriSlicesConfig",
        "ens10": "Ens10Config",
        "weather_file": "WeatherFileConfig",
        "lorenz96": "Lorenz96Config",
        "rain_ibk": "RainIbkConfig",
        "heat": "HeatConfig",
        "cora": "CoraConfig",
        "karate": "KarateConfig",
        "property_graph": "PropertyGraphConfig",
        "community_graph": "CommunityGraphConfig",
        "sampled_graph": "SampledGraphConfig",
        "partitioned_graph": "PartitionedGraphConfig",
        "knn_digits": "KnnDigitsConfig",
        "partitioned_vertices": "PartitionedVerticesConfig",
        "links": "LinksConfig",
        "programs": "ProgramsConfig",
        "clicks": "ClicksConfig",
        "criteo": "CriteoConfig",
    },
    "input": {"read_ahead": "ReadAheadConfig", "clairvoyant": "ClairvoyantConfig"},
}
