//! Parsing and formatting of sizes.

/// Parses a number of bytes: digits, and optionally `K`, `M`, `G` or `T` (powers of 1024), in either case.
pub fn parse(text: &str) -> Result<u64, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("'{text}' is not a size (examples: 64, 4K, 512M, 2G)")),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is not a size (examples: 64, 4K, 512M, 2G)"))?;
    number
        .checked_shl(shift)
        .filter(|bytes| bytes >> shift == number)
        .ok_or(format!("{text} bytes are too many"))
}

/// Formats a size in the largest unit without a fraction.
pub fn format(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_formatted() {
        for (text, bytes) in
            [("64", 64), ("4K", 4096), ("1536M", 1536 << 20), ("2G", 2 << 30), ("1T", 1 << 40)]
        {
            assert_eq!(parse(text), Ok(bytes));
            assert_eq!(format(bytes), text);
        }
        assert_eq!(parse("16k"), Ok(16384));
        for wrong in ["", "K", "4 K", "4KB", "-1", "1.5G", "99999999999999999999", "99999999999T"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
