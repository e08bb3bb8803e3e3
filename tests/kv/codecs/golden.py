"""Frozen bytes: three rows of 16 numbers in every format, and the number behind every small code.

These vectors are the formats' meaning in plain sight: changing one changes what stored bytes
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
    KVDtype.INT4_FEEDBACK: Golden(  # matrices of zeros; test_int4_feedback.py has others
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
    KVDtype.INT4_SHORT: Golden(
        1.0,
        {
            "ordinary": ("99d708598838f7a9", "08ab"),
            "constant": ("f0" + "ff" * 7, "4fa4"),
            "outlier": ("ff" * 8, "e0ff"),
        },
        [
            0.0, 0.4375, 0.0, -0.4375, 0.4375, -0.875, 1.3125, 0.875, -1.75, 2.1875, -3.5, 4.8125,
            6.5625, -7.0, 0.4375, 0.0,
        ],
    ),
    KVDtype.INT4_SHORT_FEEDBACK: Golden(  # matrices of zeros
        1.0,
        {
            "ordinary": ("99d708598838f7a9", "08ab"),
            "constant": ("f0" + "ff" * 7, "4fa4"),
            "outlier": ("ff" * 8, "e0ff"),
        },
        [
            0.0, 0.4375, 0.0, -0.4375, 0.4375, -0.875, 1.3125, 0.875, -1.75, 2.1875, -3.5, 4.8125,
            6.5625, -7.0, 0.4375, 0.0,
        ],
    ),
    KVDtype.NORMAL2: Golden(
        1.0,
        {
            "ordinary": ("da621aad", "434b"),
            "constant": ("a8aaaaaa", "5549"),
            "outlier": ("ffffffff", "ff7b"),
        },
        [
            1.8154296875, 0.0, 1.8154296875, 0.0, 0.0, -1.8154296875, 3.630859375, 1.8154296875, 0.0,
            1.8154296875, -3.630859375, 5.4462890625, 5.4462890625, -7.26171875, -1.8154296875, 0.0,
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
    KVDtype.TURBOQUANT_K8: Golden(
        1.0,
        {
            "ordinary": ("008028a830b4383abe42c64a4cce2a9d",),
            "constant": ("b8b8b8b8b8b8b8b8b8b8b8b8b8b8b8b8",),
            "outlier": ("7eb8008000000000000000000000007e",),
        },
        [
            0.0, -0.0, 0.25, -0.25, 0.5, -0.75, 1.0, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, -7.0, 0.3125,
            -0.1015625,
        ],
    ),
    KVDtype.TURBOQUANT_K4: Golden(
        1.0,
        {
            "ordinary": ("0159e0b000c86920", "134a"),
            "constant": ("0f00000000000000", "c245"),
            "outlier": ("3333333333333333", "ff7b"),
        },
        [
            0.2521038055419922, -0.2521038055419922, 0.5309009552001953, 0.2521038055419922,
            0.6851291656494141, -0.6851291656494141, 0.8808803558349609, 1.4681339263916016,
            -1.782522201538086, 2.5655269622802734, -3.3307361602783203, 4.896745681762695,
            6.148366928100586, -6.931371688842773, -0.2521038055419922, 0.2521038055419922,
        ],
    ),
    KVDtype.TURBOQUANT_K3: Golden(
        1.0,
        {
            "ordinary": ("0085a300cd21", "144a"),
            "constant": ("070000000000", "cc46"),
            "outlier": ("499224499224", "ff7b"),
        },
        [
            0.747894287109375, 0.0, 0.747894287109375, 0.0, 0.0, -0.747894287109375,
            1.49578857421875, 0.747894287109375, -2.006256103515625, 2.754150390625,
            -3.786956787109375, 4.53485107421875, 6.089996337890625, -6.837890625,
            -0.296783447265625, -0.45111083984375,
        ],
    ),
    KVDtype.TURBOQUANT_V4: Golden(
        1.0,
        {
            "ordinary": ("888879a9b6e40f88", "ef3a00c7"),
            "constant": ("0000000000000000", "000000bc"),
            "outlier": ("0f00000000000000", "ff7b00bc"),
        },
        [
            -0.06640625, -0.06640625, -0.06640625, -0.06640625, 0.80029296875, -0.93310546875,
            0.80029296875, 1.6669921875, -1.7998046875, 2.53369140625, -3.533203125, 5.1337890625,
            6.00048828125, -7.0, -0.06640625, -0.06640625,
        ],
    ),
    KVDtype.TURBOQUANT_V3: Golden(
        1.0,
        {
            "ordinary": ("24c991ab7c90", "6e3f00c7"),
            "constant": ("000000000000", "000000bc"),
            "outlier": ("070000000000", "ff7b00bc"),
        },
        [
            0.4296875, 0.4296875, 0.4296875, 0.4296875, 0.4296875, -1.427734375, 0.4296875,
            0.4296875, -1.427734375, 2.287109375, -3.28515625, 4.14453125, 6.001953125, -7.0,
            0.4296875, 0.4296875,
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
