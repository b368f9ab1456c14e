from ._clustered_attention.api import clustered_attention as clustered_attention
from ._quantized_matmul.api import quantized_matmul as quantized_matmul
from ._quantized_matmul.matrix import QuantizedMatrix as QuantizedMatrix
from ._quantized_matmul.matrix import quantized_matrix as quantized_matrix
from ._quantized_matmul.packing import pack as pack
from ._quantized_matmul.packing import packed_rows as packed_rows
from ._quantized_matmul.packing import unpack as unpack
