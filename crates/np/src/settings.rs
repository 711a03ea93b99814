//! The thresholds, and what both ends rely on.

use terrace_access::optimistic::Order;

/// The most messages of an initiator that the peer has not answered.
pub(crate) const CALL_COUNT_MAX: u32 = 16;
/// The most bytes of one call: they are held by the peer at a time.
pub(crate) const CALL_BYTES_MAX: u32 = 64 << 10;

/// The thresholds of a device's sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which requests may pass each other.
    pub order: Order,
    /// Whether READs and WRITEs go through the peer's target from the beginning, with a registration at each end for each
    /// request: the variant in user space, which needs no IOMMU (section 6.1 of the paper). Both ends have the same setting.
    pub is_two_sided: bool,
    /// Whether the peer moves the bytes of longer repetitions, to and from memory that it is lent. Otherwise it holds its pages,
    /// and the request is repeated one-sided.
    pub is_reverse: bool,
    /// The most bytes that are repeated inside a message.
    pub inline_bytes_max: u32,
    /// The most unsignaled WRITEs whose versions are not being checked.
    pub unchecked_count_max: usize,
    /// How long unsignaled WRITEs wait for a signaled request to be checked with, in nanoseconds.
    pub check_delay_ns: u64,
    /// How long a version counts as known, in nanoseconds.
    pub version_age_ns: u64,
    /// How long a peer may have memory held while its queue pair takes no request, in nanoseconds.
    pub hold_ns_max: u64,
    /// How long a peer may have memory held although its queue pair takes requests, in nanoseconds.
    pub busy_hold_ns_max: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            order: Order::Default,
            is_two_sided: false,
            is_reverse: true,
            inline_bytes_max: 4 << 10,
            unchecked_count_max: 64,
            check_delay_ns: 100_000,
            version_age_ns: 1_000_000_000,
            hold_ns_max: 10_000_000_000,
            busy_hold_ns_max: 300_000_000_000,
        }
    }
}

impl Settings {
    /// The settings in the environment.
    ///
    /// # Errors
    /// One line for the user.
    pub fn from_env() -> Result<Settings, String> {
        Settings::from_variables(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        // Shell scripts set an empty variable for an option that was not given.
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let number = |name: &str, default: u64, max: u64| match given(name) {
            None => Ok(default),
            Some(text) => match text.parse::<u64>() {
                Ok(number) if number <= max => Ok(number),
                _ => Err(format!("{name}: {text}: choose a number up to {max}")),
            },
        };
        let defaults = Settings::default();
        let order = match given("TERRACE_NP_ORDER").as_deref() {
            None | Some("default") => Order::Default,
            Some("strict") => Order::Strict,
            Some(other) => return Err(format!("TERRACE_NP_ORDER: {other}: choose default or strict")),
        };
        let is_two_sided = match given("TERRACE_NP_ACCESS").as_deref() {
            None | Some("optimistic") => false,
            Some("two-sided") => true,
            Some(other) => {
                return Err(format!("TERRACE_NP_ACCESS: {other}: choose optimistic or two-sided"));
            }
        };
        let is_reverse = match given("TERRACE_NP_REVERSE").as_deref() {
            None => defaults.is_reverse,
            Some("on") => true,
            Some("off") => false,
            Some(other) => return Err(format!("TERRACE_NP_REVERSE: {other}: choose on or off")),
        };
        let delay_us =
            number("TERRACE_NP_CHECK_DELAY_US", defaults.check_delay_ns / 1000, CHECK_DELAY_US_MAX)?;
        Ok(Settings {
            order,
            is_two_sided,
            is_reverse,
            inline_bytes_max: number("TERRACE_NP_INLINE", defaults.inline_bytes_max.into(), INLINE_BYTES_MAX)?
                as u32,
            check_delay_ns: delay_us * 1000,
            unchecked_count_max: number(
                "TERRACE_NP_UNCHECKED",
                defaults.unchecked_count_max as u64,
                UNCHECKED_MAX,
            )?
            .max(1) as usize,
            ..defaults
        })
    }
}

/// A message has no room for more.
const INLINE_BYTES_MAX: u64 = 16_000;
const CHECK_DELAY_US_MAX: u64 = 1_000_000;
const UNCHECKED_MAX: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn variables_are_parsed() {
        assert_eq!(settings(&[("TERRACE_NP_ORDER", "")]), Ok(Settings::default()));
        let variables = [
            ("TERRACE_NP_ORDER", "strict"),
            ("TERRACE_NP_ACCESS", "two-sided"),
            ("TERRACE_NP_REVERSE", "off"),
            ("TERRACE_NP_INLINE", "64"),
            ("TERRACE_NP_CHECK_DELAY_US", "5"),
        ];
        let wanted = Settings {
            order: Order::Strict,
            is_two_sided: true,
            is_reverse: false,
            inline_bytes_max: 64,
            check_delay_ns: 5000,
            ..Settings::default()
        };
        assert_eq!(settings(&variables), Ok(wanted));
    }

    #[test]
    fn invalid_values_are_named() {
        for (name, value) in [
            ("TERRACE_NP_ORDER", "no"),
            ("TERRACE_NP_ACCESS", "one-sided"),
            ("TERRACE_NP_REVERSE", "yes"),
            ("TERRACE_NP_INLINE", "16001"),
            ("TERRACE_NP_UNCHECKED", "x"),
        ] {
            let error = settings(&[(name, value)]).unwrap_err();
            assert!(error.starts_with(name) && error.contains(value), "{error}");
        }
    }
}
