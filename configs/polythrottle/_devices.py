"""Two simulated devices, which resemble NVIDIA's Jetson TX2 and AGX Orin.

Grids of clocks and peaks follow what is published; watts, voltages and efficiencies are
stated, not measured.
"""

from hpcjax.cost import DevicePower

TX2 = DevicePower(
    gpu_mhz=(
        *(114.75, 216.75, 318.75, 420.75, 522.75, 624.75, 726.75),
        *(854.25, 930.75, 1032.75, 1122.0, 1236.75, 1300.5),
    ),
    mem_mhz=(408.0, 665.6, 800.0, 1062.4, 1331.2, 1600.0, 1866.0),
    cpu_mhz=(
        *(345.0, 499.0, 652.0, 806.0, 960.0, 1113.0),
        *(1267.0, 1420.0, 1574.0, 1728.0, 1881.0, 2035.0),
    ),
    peak=1.33e12,
    bandwidth=59.7e9,
    idle_w=2.2,
    gpu_w=6.5,
    mem_w=2.6,
    cpu_w=1.2,
)
ORIN = DevicePower(
    gpu_mhz=(
        *(114.75, 216.75, 318.75, 408.0, 510.0, 612.0, 714.0),
        *(816.0, 918.0, 1020.0, 1122.0, 1224.0, 1300.5),
    ),
    mem_mhz=(408.0, 665.6, 1065.6, 1600.0, 2133.0, 2666.0, 3199.0),
    cpu_mhz=(
        *(268.8, 422.4, 576.0, 729.6, 883.2, 1036.8),
        *(1190.4, 1344.0, 1497.6, 1728.0, 1958.4, 2201.6),
    ),
    peak=10.6e12,
    bandwidth=204.8e9,
    idle_w=8.0,
    gpu_w=26.0,
    mem_w=8.0,
    cpu_w=3.0,
)
