"""Global scales of nvfp4 without a calibrated checkpoint.

Convention: stored * block * global = value. With a global scale g, block maxima from 0.094 g to
2688 g are stored at full precision (block scales are e4m3: normal from 2^-6, at most 448, times 6);
above they are cut off, below they lose precision step by step.

Chosen by measurement on 2026-11-21, `python recipes/nvfp4_scales.py` (SmolLM2-135M-Instruct, 1771
tokens of eight GSM8K problems and four texts, 30 layers). Largest number of a block of 16:
0.1 % / median / 99.9 % / largest is 0.149 / 3.80 / 17.8 / 24.1 for K, 0.036 / 1.62 / 7.86 / 14.9
for V. Relative squared error of what is stored, of the worst layer's, and of attention's output:

    g       K stored  worst    attention     V stored  worst    attention
    2^-11   0.49692   0.57029  0.70440       0.18585   0.33102  0.15927
    2^-10   0.29097   0.38824  0.59676       0.04597   0.10694  0.03564
    2^-9    0.12494   0.22366  0.23337       0.01099   0.01855  0.00680
    2^-8    0.01935   0.05553  0.05491       0.00888   0.00907  0.00503
    2^-7    0.00849   0.00904  0.03357       0.00885   0.00902  0.00501
    2^-4    0.00849   0.00904  0.03357       0.00885   0.00902  0.00501
    2^0     0.00849   0.00904  0.03357       0.00885   0.00902  0.00501
    2^2     0.00849   0.00904  0.03357       0.00885   0.01205  0.00502
    2^4     0.00849   0.00904  0.03365       0.00892   0.02814  0.00531
    2^6     0.00886   0.00992  0.03690       0.01122   0.14659  0.00740
    2^8     0.01428   0.01733  0.07981       0.01708   0.51023  0.01846

From 2^-7 to 2^0 nothing changes for this model, so the choice is for other models.
K: 1.0 holds 2688, room for the keys of
several hundred that biased projections are known for (Qwen2.5), and is what ModelOpt's uncalibrated
recipe `nvfp4_cast` means. V: 2^-4 holds 168, 11 times the largest here, and keeps full precision
down to block maxima of 0.006 for models whose early layers have values of about 0.01.
"""

from __future__ import annotations

NVFP4_GLOBAL_K = 1.0
NVFP4_GLOBAL_V = 2.0**-4
