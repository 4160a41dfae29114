"""The /sys and /proc of real boards, made of files: zones, trips, clocks, coolers, chips and flags as they show them.

Names, trips and units are those of the kernels' device trees and drivers; the values are of a board at work. Entries
that mislead (placeholders, sensors of other parts, zones without power) are there as on the boards.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.sensors.tree import FakeTree

PI_FIRMWARE = "devices/platform/soc/soc:firmware/get_throttled"


def device_tree(tree: FakeTree, *compatible: str) -> None:
    tree.write(tree.proc / "device-tree" / "compatible", "".join(f"{item}\0" for item in compatible))


def cluster(tree: FakeTree, first: int, cpus: str, now_khz: int, min_khz: int, max_khz: int, driver: str) -> None:
    folder = tree.sys / "devices/system/cpu/cpufreq" / f"policy{first}"
    for name, text in {
        "affected_cpus": cpus,
        "cpuinfo_min_freq": str(min_khz),
        "cpuinfo_max_freq": str(max_khz),
        "scaling_cur_freq": str(now_khz),
        "scaling_max_freq": str(max_khz),
        "scaling_governor": "schedutil",
        "scaling_driver": driver,
    }.items():
        tree.write(folder / name, f"{text}\n")


def chip(tree: FakeTree, index: int, name: str, **files: int | str) -> None:
    folder = tree.sys / "class/hwmon" / f"hwmon{index}"
    tree.write(folder / "name", f"{name}\n")
    for file, value in files.items():
        tree.write(folder / file, f"{value}\n")


def domain(tree: FakeTree, folder: str, name: str, energy_uj: int, range_uj: int = 262_143_328_850) -> None:
    root = tree.sys / "class/powercap" / folder
    for file, value in {"name": name, "energy_uj": energy_uj, "max_energy_range_uj": range_uj}.items():
        tree.write(root / file, f"{value}\n")


def running(tree: FakeTree, cpus: int) -> None:
    tree.cpus(f"0-{cpus - 1}", f"0-{cpus - 1}")
    tree.write(tree.sys / "devices/system/cpu/offline", "\n")
    tree.write(tree.proc / "stat", "cpu  100 0 100 700 100 0 0 0 0 0\n")
    tree.write(tree.proc / "loadavg", "1.50 0.75 0.25 2/300 4242\n")


def raspberry_pi_4(tree: FakeTree) -> None:
    device_tree(tree, "raspberrypi,4-model-b", "brcm,bcm2711")
    running(tree, 4)
    tree.zone(0, "cpu-thermal", 61341, [("critical", 110000)])
    cluster(tree, 0, "0 1 2 3", 1_500_000, 600_000, 1_500_000, "cpufreq-dt")
    chip(tree, 0, "cpu_thermal", temp1_input=61341, temp1_crit=110000)
    chip(tree, 1, "rpi_volt", in0_lcrit_alarm=0)
    tree.write(tree.sys / PI_FIRMWARE, "0\n")


def raspberry_pi_5(tree: FakeTree) -> None:
    device_tree(tree, "raspberrypi,5-model-b", "brcm,bcm2712")
    running(tree, 4)
    trips = [("critical", 110000), ("active", 50000), ("active", 60000), ("active", 67500), ("active", 75000)]
    tree.zone(0, "cpu-thermal", 57300, trips)
    tree.cooler(0, "pwm-fan", 2)
    cluster(tree, 0, "0 1 2 3", 2_400_000, 1_500_000, 2_400_000, "cpufreq-dt")
    chip(tree, 0, "cpu_thermal", temp1_input=57300)
    chip(tree, 1, "rp1_adc", temp1_input=48211, in1_input=1482)
    chip(tree, 2, "pwmfan", fan1_input=3100, pwm1=125)
    chip(tree, 3, "rpi_volt", in0_lcrit_alarm=0)
    tree.write(tree.sys / "devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled", "0\n")


def jetson_orin_nano(tree: FakeTree) -> None:
    device_tree(tree, "nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234")
    running(tree, 6)
    trips = [("critical", 104500), ("hot", 99000), ("passive", 95000), ("active", 80000)]
    tree.zone(0, "cpu-thermal", 51812, trips)
    tree.zone(1, "gpu-thermal", 49281)
    tree.zone(2, "cv0-thermal", "")  # no power: EAGAIN on the board, nothing in a file
    tree.zone(3, "cv1-thermal", "")
    tree.zone(4, "soc0-thermal", 48593)
    tree.zone(5, "tj-thermal", 52343, trips)
    tree.cooler(0, "pwm-fan", 1)
    tree.cooler(1, "thermal-cpufreq-0", 0)
    tree.cooler(2, "thermal-devfreq-0", 0)
    cluster(tree, 0, "0 1 2 3", 1_510_400, 115_200, 1_510_400, "tegra194")
    cluster(tree, 4, "4 5", 1_510_400, 115_200, 1_510_400, "tegra194")
    chip(
        tree, 0, "ina3221",
        in1_label="VDD_IN", in1_input=5064, curr1_input=1384,
        in2_label="VDD_CPU_GPU_CV", in2_input=5064, curr2_input=416,
        in3_label="VDD_SOC", in3_input=5056, curr3_input=328,
        in7_label="sum of shunt voltages", in7_input=10, curr4_input=2128,
    )  # fmt: skip
    chip(tree, 1, "soctherm_oc", oc1_event_cnt=0, oc2_event_cnt=0, oc3_event_cnt=4)


def rk3588(tree: FakeTree) -> None:
    device_tree(tree, "radxa,rock-5b", "rockchip,rk3588")
    running(tree, 8)
    passive = [("passive", 85000), ("critical", 115000)]
    for index, (kind, temp, trips) in enumerate((
        ("package-thermal", 58000, [("critical", 115000)]), ("bigcore0-thermal", 59000, passive),
        ("bigcore2-thermal", 60000, passive), ("littlecore-thermal", 58000, passive),
        ("center-thermal", 57000, [("critical", 115000)]), ("gpu-thermal", 71000, passive),
        ("npu-thermal", 57000, [("critical", 115000)]),
    )):  # fmt: skip
        tree.zone(index, kind, temp, trips)
    for index in range(3):
        tree.cooler(index, f"thermal-cpufreq-{index}", 0)
    cluster(tree, 0, "0 1 2 3", 1_800_000, 408_000, 1_800_000, "cpufreq-dt")
    cluster(tree, 4, "4 5", 2_400_000, 408_000, 2_400_000, "cpufreq-dt")
    cluster(tree, 6, "6 7", 2_352_000, 408_000, 2_352_000, "cpufreq-dt")


def imx8mp(tree: FakeTree) -> None:
    device_tree(tree, "fsl,imx8mp-evk", "fsl,imx8mp")
    running(tree, 4)
    trips = [("passive", 85000), ("critical", 95000)]
    tree.zone(0, "cpu-thermal", 47000, trips)
    tree.zone(1, "soc-thermal", 48000, trips)
    tree.cooler(0, "cpufreq-cpu0", 0)
    cluster(tree, 0, "0 1 2 3", 1_200_000, 1_200_000, 1_600_000, "cpufreq-dt")


def n100(tree: FakeTree) -> None:
    running(tree, 4)
    tree.write(tree.proc / "cpuinfo", "processor\t: 0\nmodel name\t: Intel(R) N100\nflags\t\t: avx2\n")
    tree.zone(0, "acpitz", 27800, [("critical", 110000)])
    tree.zone(1, "INT3400 Thermal", 20000)
    tree.zone(2, "TCPU", 55000)
    tree.zone(3, "iwlwifi_1", 41000)
    tree.zone(4, "x86_pkg_temp", 56000, [("passive", 0), ("passive", 0)])
    for index in range(4):
        tree.cooler(index, "Processor", 0)
        tree.write(tree.sys / f"devices/system/cpu/cpu{index}/thermal_throttle/core_throttle_count", "3\n")
        tree.write(tree.sys / f"devices/system/cpu/cpu{index}/thermal_throttle/package_throttle_count", "7\n")
    tree.cooler(4, "intel_powerclamp", -1)
    for index in range(4):
        cluster(tree, index, str(index), 2_893_000, 700_000, 3_400_000, "intel_pstate")
    chip(tree, 0, "acpitz", temp1_input=27800, temp1_crit=110000)
    chip(tree, 1, "nvme", temp1_input=38850, temp1_label="Composite", temp1_max=-273150, temp1_crit=84850)
    chip(
        tree, 2, "coretemp",
        temp1_input=56000, temp1_label="Package id 0", temp1_crit=105000,
        temp2_input=55000, temp2_label="Core 0",
    )  # fmt: skip
    domain(tree, "intel-rapl:0", "package-0", 1_000_000)
    domain(tree, "intel-rapl:0:0", "core", 400_000)
    domain(tree, "intel-rapl-mmio:0", "package-0", 1_000_000)


BOARDS: dict[str, Callable[[FakeTree], None]] = {
    "raspberry-pi-4-2gb": raspberry_pi_4,
    "raspberry-pi-5-8gb": raspberry_pi_5,
    "jetson-orin-nano": jetson_orin_nano,
    "rock-5b": rk3588,
    "imx8m-plus": imx8mp,
    "n100-8gb": n100,
}
