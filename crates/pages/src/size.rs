//! Sizes as text.

/// The text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size: give bytes, or a number with K, M, G or T (powers of 1024), such as 512M")]
pub struct NotASize(String);

/// Parses a number of bytes: `536870912`, `512M`, `512MiB`, `2g`.
///
/// # Errors
/// For zero, for sizes that exceed 64 bits, and for any other text.
pub fn parse(text: &str) -> Result<u64, NotASize> {
    let error = || NotASize(text.to_owned());
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| error())?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(error()),
    };
    number.checked_mul(1 << shift).filter(|&bytes| bytes > 0).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1", 1),
            ("4096b", 4096),
            ("3K", 3 << 10),
            ("512m", 512 << 20),
            ("2GiB", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn nonsense_is_no_size() {
        for text in [
            "",
            "0",
            "0G",
            "G",
            "-1",
            "+1",
            "1.5G",
            "1 G",
            "1GB2",
            "1MB",
            "16777216T",
            "99999999999999999999",
            "\u{664}K",
        ] {
            assert!(parse(text).unwrap_err().to_string().contains("512M"), "{text}");
        }
    }
}
