"""Frozen bytes: three rows of 16 numbers in every format, and the number behind every small code.

These vectors are the formats' meaning in plain sight: whoever changes one changes what stored bytes
mean, and needs a new format name. They were computed by `oracle.py` and are compared with both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Encoding

ROWS: dict[str, list[float]] = {
    "ordinary": [
        0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25,
        -1.75, 2.5, -3.5, 5.0, 6.0, -7.0, 0.3, -0.1,
    ],
    "constant": [-1.0] * 16,
    "outlier": [3e38, -1.0, 1e-40, -1e-40, *[0.0] * 11, 1000.0],
}  # fmt: skip


@dataclass(frozen=True)
class Golden:
    """planes: hex of each plane of one row, in the order of the format, little-endian.

    scale: the scale from outside, where the format takes one.
    values: the decoded "ordinary" row, exactly, as float32.
    """

    scale: float
    planes: dict[str, tuple[str, ...]]
    values: list[float]


GOLDEN: dict[KVDtype, Golden] = {
    KVDtype.FLOAT32: Golden(
        1.0,
        {
            "ordinary": (
                "00000000000000800000803e000080be0000003f000040bf0000803f0000a03f"
                "0000e0bf00002040000060c00000a0400000c0400000e0c09a99993ecdccccbd",
            ),
            "constant": ("000080bf" * 16,),
            "outlier": ("e6b1617f000080bfc2160100c2160180" + "00000000" * 11 + "00007a44",),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.30000001192092896, -0.10000000149011612,
        ],
    ),
    KVDtype.FLOAT16: Golden(
        1.0,
        {
            "ordinary": ("00000080003400b4003800ba003c003d00bf004100c30045004600c7cd3466ae",),
            "constant": ("00bc" * 16,),
            "outlier": ("ff7b00bc00000080" + "0000" * 11 + "d063",),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.300048828125, -0.0999755859375,
        ],
    ),
    KVDtype.BFLOAT16: Golden(
        1.0,
        {
            "ordinary": ("00000080803e80be003f40bf803fa03fe0bf204060c0a040c040e0c09a3ecdbd",),
            "constant": ("80bf" * 16,),
            "outlier": ("627f80bf01000180" + "0000" * 11 + "7a44",),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.30078125, -0.10009765625,
        ],
    ),
    KVDtype.FP8_E4M3: Golden(
        0.5,
        {
            "ordinary": ("008030b038bc4042c64ace5254d632a5",),
            "constant": ("c0" * 16,),
            "outlier": ("7ec00080" + "00" * 11 + "7e",),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.3125, -0.1015625,
        ],
    ),
    KVDtype.FP8_E4M3FNUZ: Golden(
        0.5,
        {
            "ordinary": ("000038b840c4484ace52d65a5cde3aad",),
            "constant": ("c8" * 16,),
            "outlier": ("7fc80000" + "00" * 11 + "7f",),
        },
        [
            0.0, 0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.3125, -0.1015625,
        ],
    ),
    KVDtype.FP8_E5M2: Golden(
        1.0,
        {
            "ordinary": ("008034b438ba3c3dbf41c34546c735ae",),
            "constant": ("bc" * 16,),
            "outlier": ("7bbc0080" + "00" * 11 + "64",),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.3125, -0.09375,
        ],
    ),
    KVDtype.FP8_PER_TOKEN_HEAD: Golden(
        1.0,
        {
            "ordinary": ("008058d860e4686aee72f67a7cfe5acd", "0000803c"),
            "constant": ("fe" * 16, "2549123b"),
            "outlier": ("7e800080" + "00" * 12, "2549126d"),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0,
            0.3125, -0.1015625,
        ],
    ),
    KVDtype.INT8_PER_TOKEN_HEAD: Golden(
        1.0,
        {
            "ordinary": ("000005fb09f21217e02dc05b6d8105fe", "87c3613d"),
            "constant": ("81" * 16, "0402013c"),
            "outlier": ("7f" + "00" * 15, "0402016e"),
        },
        [
            0.0, 0.0, 0.27559053897857666, -0.27559053897857666, 0.4960629940032959,
            -0.7716535329818726, 0.9921259880065918, 1.2677165269851685, -1.7637795209884644,
            2.4803149700164795, -3.5275590419769287, 5.015748023986816, 6.007874011993408, -7.0,
            0.27559053897857666, -0.11023622006177902,
        ],
    ),
    KVDtype.INT4_PER_TOKEN_HEAD: Golden(
        1.0,
        {
            "ordinary": ("99d708598838f7a9", "08205f40"),
            "constant": ("f0" + "ff" * 7, "0f80883f"),
            "outlier": ("ff" * 8, "0080886f"),
        },
        [
            0.0, 0.435791015625, 0.0, -0.435791015625, 0.435791015625, -0.87158203125,
            1.307373046875, 0.87158203125, -1.7431640625, 2.178955078125, -3.486328125,
            4.793701171875, 6.536865234375, -6.97265625, 0.435791015625, 0.0,
        ],
    ),
    KVDtype.NVFP4: Golden(
        0.125,
        {
            "ordinary": ("808091224b6df781", "51"),
            "constant": ("ff" * 8, "3b"),
            "outlier": ("8780" + "00" * 5 + "70", "7e"),
        },
        [
            0.0, -0.0, 0.0, -0.0, 0.5625, -0.5625, 1.125, 1.125, -1.6875, 2.25, -3.375, 4.5, 6.75,
            -6.75, 0.5625, -0.0,
        ],
    ),
}  # fmt: skip


def read_golden_codes() -> dict[Encoding, list[float]]:
    """The number behind every code of every encoding of 8 or fewer bits, from golden_codes.txt."""
    found: dict[Encoding, list[float]] = {}
    for line in Path(__file__).with_name("golden_codes.txt").read_text().splitlines():
        if line.startswith("["):
            numbers = found.setdefault(Encoding(line.strip("[]")), [])
        elif line and not line.startswith("#"):
            numbers += map(float, line.split())
    return found
