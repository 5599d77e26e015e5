//! Narrow floating-point formats, one value at a time.

use half::{bf16, f16};

/// BF16 bits to f32: the same value, shifted into the upper half.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 to BF16 bits, round half to even; NaN stays NaN.
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// F16 bits to f32, subnormals, infinities and NaN included.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// f32 to F16 bits, round half to even.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

/// FP8 E4M3 ("fn" variant) to f32: exponent bias 7, no infinities, codes 0x7F
/// and 0xFF are NaN.
#[inline]
pub const fn fp8_e4m3_to_f32(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0f32 } else { -1.0 };
    let exponent = ((code >> 3) & 0xF) as i32;
    let mantissa = (code & 7) as f32;
    if code & 0x7F == 0x7F {
        return f32::NAN;
    }
    if exponent == 0 {
        return sign * mantissa * (1.0 / 512.0);
    }
    // 2^(exponent - 7), exact for every exponent of the format.
    let scale = f32::from_bits(((exponent - 7 + 127) as u32) << 23);
    sign * (1.0 + mantissa * 0.125) * scale
}

/// [`fp8_e4m3_to_f32`] of every code, for those who decode many.
pub static FP8_E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = fp8_e4m3_to_f32(code as u8);
        code += 1;
    }
    values
};

/// f32 to the nearest FP8 E4M3 code, ties to an even code, out of range to the largest value; NaN stays NaN.
#[inline]
pub fn f32_to_fp8_e4m3(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let size = value.abs();
    if size.is_nan() {
        return sign | 0x7F;
    }
    if size >= 448.0 {
        return sign | 0x7E;
    }
    if size < 1.0 / 64.0 {
        // Steps of 2^-9, as below the smallest normal number; 8 of them are that number.
        return sign | (size * 512.0).round_ties_even() as u8;
    }
    // Normal in both formats: drop 20 bits of mantissa, half to even, and move the exponent's bias.
    let bits = size.to_bits();
    let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
    sign | ((rounded >> 20) - ((127 - 7) << 3)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_keeps_the_upper_half() {
        assert_eq!(bf16_to_f32(0x3F80), 1.0);
        assert_eq!(bf16_to_f32(0xC049), -3.140_625);
        // Half to even: 1 + 2^-8 lies between 0x3F80 and 0x3F81.
        assert_eq!(f32_to_bf16(1.0 + 1.0 / 256.0), 0x3F80);
        assert_eq!(f32_to_bf16(1.0 + 3.0 / 256.0), 0x3F82);
    }

    #[test]
    fn f16_subnormals_and_specials() {
        assert_eq!(f16_to_f32(0x0001), 2f32.powi(-24));
        assert_eq!(f16_to_f32(0x7C00), f32::INFINITY);
        assert!(f16_to_f32(0x7E00).is_nan());
        assert_eq!(f32_to_f16(65504.0), 0x7BFF);
    }

    #[test]
    fn fp8_matches_the_definition() {
        assert_eq!(fp8_e4m3_to_f32(0x00), 0.0);
        assert_eq!(fp8_e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(fp8_e4m3_to_f32(0x08), 2f32.powi(-6));
        assert_eq!(fp8_e4m3_to_f32(0x38), 1.0);
        assert_eq!(fp8_e4m3_to_f32(0xBC), -1.5);
        assert_eq!(fp8_e4m3_to_f32(0x7E), 448.0);
        assert!(fp8_e4m3_to_f32(0x7F).is_nan() && fp8_e4m3_to_f32(0xFF).is_nan());
    }

    #[test]
    fn fp8_codes_round_trip_and_values_go_to_the_nearest() {
        let codes = (0..=255u8).filter(|code| code & 0x7F != 0x7F);
        for code in codes {
            assert_eq!(f32_to_fp8_e4m3(fp8_e4m3_to_f32(code)), code, "{code:#x}");
        }
        // Halfway between two codes: to the even one; a little beside it: to the nearer one.
        for code in 0..0x7Du8 {
            let (low, high) = (fp8_e4m3_to_f32(code), fp8_e4m3_to_f32(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(f32_to_fp8_e4m3(middle), code + (code & 1), "{code:#x}");
            assert_eq!(f32_to_fp8_e4m3(-middle * 0.999), 0x80 | code, "{code:#x}");
            assert_eq!(f32_to_fp8_e4m3(middle * 1.001), code + 1, "{code:#x}");
        }
        assert_eq!(f32_to_fp8_e4m3(1e9), 0x7E);
        assert_eq!(f32_to_fp8_e4m3(f32::NEG_INFINITY), 0xFE);
        assert_eq!(f32_to_fp8_e4m3(f32::NAN) & 0x7F, 0x7F);
    }
}
