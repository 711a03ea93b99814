//! The settings in the environment: `TERRACE_DRAM` and the other variables.

use std::ffi::OsString;
use std::path::PathBuf;

use terrace_pages::size;

/// The treatment of an on-demand region over a file mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The region is paged to the file: an access to an absent page waits for the fetch.
    Wait,
    /// On-demand paging as in hardware, for comparison.
    Odp,
    /// The region is locked into memory as a whole, for comparison.
    Pin,
}

/// The settings in the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The memory budget of the regions, in bytes.
    pub dram_bytes: u64,
    /// The treatment of regions.
    pub mode: Mode,
    /// The directory of swap files for private memory. Without it such memory is not paged.
    pub swap: Option<PathBuf>,
    /// Whether pages are also evicted at random.
    pub churn: bool,
}

impl Settings {
    /// Reads the environment; `None` without a memory budget.
    ///
    /// # Errors
    /// One line for the user.
    pub fn from_env() -> Result<Option<Settings>, String> {
        Settings::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Settings>, String> {
        // Shell scripts set an empty variable for an option that was not given.
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let given = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let Some(dram) = given("TERRACE_DRAM") else { return Ok(None) };
        let dram_bytes = size::parse(&dram).map_err(|error| format!("TERRACE_DRAM: {error}"))?;
        let mode = match given("TERRACE_MODE").as_deref() {
            None | Some("wait") => Mode::Wait,
            Some("odp") => Mode::Odp,
            Some("pin") => Mode::Pin,
            Some(other) => return Err(format!("TERRACE_MODE: {other}: choose wait, odp or pin")),
        };
        // NP-RDMA has nothing to hold such regions with, and would answer its peers for ever that they are busy.
        if mode != Mode::Wait && given("TERRACE_NIC").as_deref() == Some("commodity") {
            return Err("TERRACE_MODE: TERRACE_NIC=commodity goes with wait only".into());
        }
        // The modes for comparison page files only. A path may have any bytes.
        let swap = set("TERRACE_SWAP").filter(|directory| mode == Mode::Wait && directory != "none");
        Ok(Some(Settings {
            dram_bytes,
            mode,
            swap: swap.map(PathBuf::from),
            churn: given("TERRACE_CHURN").is_some(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Option<Settings>, String> {
        Settings::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn without_a_budget_there_are_no_settings() {
        assert_eq!(settings(&[]), Ok(None));
        assert_eq!(settings(&[("TERRACE_DRAM", ""), ("TERRACE_MODE", "nonsense")]), Ok(None));
    }

    #[test]
    fn budget_and_mode_are_parsed() {
        let wanted = Settings { dram_bytes: 512 << 20, mode: Mode::Wait, swap: None, churn: false };
        assert_eq!(settings(&[("TERRACE_DRAM", "512M")]), Ok(Some(wanted.clone())));
        let variables = [("TERRACE_DRAM", "512M"), ("TERRACE_SWAP", "/var/tmp")];
        let with_swap = Settings { swap: Some("/var/tmp".into()), ..wanted.clone() };
        assert_eq!(settings(&variables), Ok(Some(with_swap)));
        let variables =
            [("TERRACE_DRAM", "536870912"), ("TERRACE_MODE", "pin"), ("TERRACE_CHURN", "1"), variables[1]];
        let wanted = Settings { mode: Mode::Pin, churn: true, ..wanted };
        assert_eq!(settings(&variables), Ok(Some(wanted)));
    }

    #[test]
    fn a_directory_may_have_any_name() {
        let directory = OsString::from_vec(b"/swap/\xff".to_vec());
        let settings = Settings::from_variables(|name| match name {
            "TERRACE_DRAM" => Some("1M".into()),
            "TERRACE_SWAP" => Some(directory.clone()),
            _ => None,
        });
        assert_eq!(settings.unwrap().unwrap().swap, Some(PathBuf::from(directory)));
    }

    #[test]
    fn invalid_settings_are_named() {
        for (name, value) in [("TERRACE_DRAM", "much"), ("TERRACE_MODE", "term")] {
            let error = settings(&[(name, value), ("TERRACE_DRAM", "1M")]).unwrap_err();
            assert!(error.starts_with(name) && error.contains(value), "{error}");
        }
        let commodity = ("TERRACE_NIC", "commodity");
        let error = settings(&[("TERRACE_DRAM", "1M"), ("TERRACE_MODE", "pin"), commodity]).unwrap_err();
        assert!(error.contains("commodity"), "{error}");
        assert!(settings(&[("TERRACE_DRAM", "1M"), ("TERRACE_MODE", "wait"), commodity]).is_ok());
    }
}
