"""A folder that looks like /sys: processors, a GPU's devfreq, energy counters."""

POLICY, GPU = "devices/system/cpu/cpufreq/policy0", "class/devfreq/gpu"
RAPL = "class/powercap/intel-rapl:0"
FILES = {
    f"{POLICY}/scaling_min_freq": "800",
    f"{POLICY}/scaling_max_freq": "2000",
    f"{POLICY}/scaling_cur_freq": "2000",
    f"{POLICY}/scaling_available_frequencies": "2000 1600 1200 800",
    f"{POLICY}/cpuinfo_min_freq": "800",
    f"{POLICY}/cpuinfo_max_freq": "2000",
    f"{GPU}/min_freq": "100",
    f"{GPU}/max_freq": "1300",
    f"{GPU}/cur_freq": "1300",
    f"{GPU}/available_frequencies": "100 500 900 1300",
    f"{RAPL}/energy_uj": "1000",
    f"{RAPL}/max_energy_range_uj": "9000",
    f"{RAPL}:0/energy_uj": "77",
}


def make(root):
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def limits(root):
    """The pairs of least and greatest clocks."""
    names = (
        ("scaling_min_freq", "scaling_max_freq", POLICY),
        ("min_freq", "max_freq", GPU),
    )
    return [
        tuple(int((root / folder / name).read_text()) for name in (low, high))
        for low, high, folder in names
    ]


ORIGINAL = [(800, 2000), (100, 1300)]
