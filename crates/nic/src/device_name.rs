//! The name of the device, which programs compare and look for in sysfs.

use std::fmt;
use std::str::FromStr;

use crate::setup::{OpenError, parsed};

/// The longest name that `struct ibv_device` and the kernel hold, without its terminator.
const LEN_MAX: usize = 63;

/// What a name must be, in words that follow "it is not".
const EXPECTED: &str =
    "a device name: letters, digits, `_`, `-` and `.`, at most 63, the first one a letter or a digit";

/// A name that the device can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName(String);

impl DeviceName {
    /// The name that `terrace run --device-name` puts into `TERRACE_DEVICE_NAME`, or the default one.
    ///
    /// # Errors
    /// `Variable` for a name that no device can have.
    pub fn from_env() -> Result<DeviceName, OpenError> {
        Ok(parsed("TERRACE_DEVICE_NAME", EXPECTED)?.unwrap_or_default())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for DeviceName {
    fn default() -> DeviceName {
        DeviceName("terrace0".to_owned())
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceName, String> {
        let is_valid = text.len() <= LEN_MAX
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.chars().all(|other| other.is_ascii_alphanumeric() || ['_', '-', '.'].contains(&other));
        if is_valid { Ok(DeviceName(text.to_owned())) } else { Err(format!("it is not {EXPECTED}")) }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_into_a_path_and_into_the_structure() {
        let longest = "m".repeat(LEN_MAX);
        for name in ["mlx5_0", "rxe0", "rocep1s0f0", "a.b-c", "0", &longest] {
            assert_eq!(name.parse().as_ref().map(DeviceName::as_str), Ok(name));
        }
        for name in ["", ".", "..", "_0", "-d", "a/b", "a b", "a\n", "ä", &"m".repeat(LEN_MAX + 1)] {
            assert!(name.parse::<DeviceName>().is_err(), "{name:?}");
        }
    }
}
