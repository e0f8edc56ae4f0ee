"""Functions to a rounding or two, where the hardware's are good to 22 bits: a head that always forgets at one rate adds their errors up."""

import triton
import triton.language as tl


@triton.jit
def parts(b_x):
    """2^n, which is exact, and e^r - 1 by its series: e^x = 2^n e^r in fp32, x = n ln 2 + r, |r| <= ln 2 / 2. 2^n = 0 below e^-104."""
    b_x = tl.where(b_x < -104.0, -104.0, b_x)  # NaN stays
    b_n = tl.floor(b_x * 1.4426950408889634 + 0.5)
    b_r = tl.fma(b_n, -0.693145751953125, b_x)  # ln 2 in two parts: n times the first is exact
    b_r = tl.fma(b_n, -1.42860677e-06, b_r)
    b_p = tl.fma(b_r, 1.0 / 5040, 1.0 / 720)
    b_p = tl.fma(b_r, b_p, 1.0 / 120)
    b_p = tl.fma(b_r, b_p, 1.0 / 24)
    b_p = tl.fma(b_r, b_p, 1.0 / 6)
    b_p = tl.fma(b_r, b_p, 0.5)
    b_p = tl.fma(b_r * b_r, b_p, b_r)
    return tl.exp2(b_n), b_p


@triton.jit
def exp(b_x):
    """e^x."""
    b_2, b_p = parts(b_x)
    return b_2 * (b_p + 1.0)


@triton.jit
def left_over(b_x):
    """1 - e^x, however small."""
    b_2, b_p = parts(b_x)
    return (1.0 - b_2) - b_2 * b_p


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x)."""
    b_z = exp(-tl.abs(b_x))
    return tl.div_rn(tl.where(b_x < 0, b_z, tl.where(b_x >= 0, 1.0, b_x)), 1.0 + b_z)  # NaN stays


@triton.jit
def softplus(b_x):
    """log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x| <= 1; log(1 + z) = 2 artanh s by its series, s = z / (2 + z) <= 1/3."""
    b_z = exp(-tl.abs(b_x))
    b_s = tl.div_rn(b_z, 2.0 + b_z)
    b_2 = b_s * b_s
    b_p = tl.fma(b_2, 1.0 / 15, 1.0 / 13)
    b_p = tl.fma(b_2, b_p, 1.0 / 11)
    b_p = tl.fma(b_2, b_p, 1.0 / 9)
    b_p = tl.fma(b_2, b_p, 1.0 / 7)
    b_p = tl.fma(b_2, b_p, 1.0 / 5)
    b_p = tl.fma(b_2, b_p, 1.0 / 3)
    b_p = tl.fma(b_2 * b_s, b_p, b_s)
    return tl.where(b_x < 0, 0.0, b_x) + 2.0 * b_p
