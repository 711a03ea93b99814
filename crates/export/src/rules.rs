//! The rules of an export: which clients are which users, and what they may do.
//!
//! ```toml
//! # A client of the same host has the user and the groups of its process, which the kernel names. These are the defaults:
//! [local]
//! access = "rw"            # or "ro", or "none"
//!
//! # Clients of other hosts, by address; the first rule that matches counts. Without a rule they are refused.
//! [[remote]]
//! from = "192.0.2.0/24"    # an address, or a prefix of addresses
//! user = "alice"           # a user's name or number, with the groups of that user
//! access = "rw"
//!
//! # A client that is root is this user, unless root = true.
//! squash = "nobody"
//! root = false
//! # Keys of unlinked files stay valid for clients that had them open.
//! keep_unlinked = false
//! ```

use std::ffi::CString;
use std::net::IpAddr;
use std::path::Path;

use nix::unistd::{Gid, Uid, User, getgrouplist};
use serde::Deserialize;

/// Why rules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file cannot be read.
    #[error("cannot read the rules: {0}")]
    Read(#[from] std::io::Error),
    /// The file is no such TOML.
    #[error("invalid rules: {0}")]
    Syntax(#[from] toml::de::Error),
    /// An address, a prefix or a user is invalid.
    #[error("invalid rules: {what} {value:?}")]
    Value {
        /// What is invalid.
        what: &'static str,
        /// The value.
        value: String,
    },
}

/// What a client may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Permitted {
    None,
    #[serde(rename = "ro")]
    ReadOnly,
    #[default]
    #[serde(rename = "rw")]
    ReadWrite,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    local: LocalRule,
    #[serde(default)]
    remote: Vec<RemoteRule>,
    squash: Option<String>,
    #[serde(default)]
    root: bool,
    #[serde(default)]
    keep_unlinked: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LocalRule {
    #[serde(default)]
    access: Permitted,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoteRule {
    from: String,
    user: String,
    #[serde(default)]
    access: Permitted,
}

/// The user as whom the server accesses files for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    pub is_read_only: bool,
}

impl Identity {
    /// A user of the host, with the groups that the user has there.
    fn of_user(user: &User, is_read_only: bool) -> Identity {
        let groups =
            CString::new(user.name.as_bytes()).ok().and_then(|name| getgrouplist(&name, user.gid).ok());
        let groups = groups.unwrap_or_default().into_iter().map(Gid::as_raw).collect();
        Identity { uid: user.uid.as_raw(), gid: user.gid.as_raw(), groups, is_read_only }
    }
}

#[derive(Clone, Debug)]
struct Remote {
    from: Prefix,
    identity: Option<Identity>,
}

/// The rules of an export.
#[derive(Clone, Debug)]
pub struct Rules {
    local: Permitted,
    remote: Vec<Remote>,
    squash: Option<Identity>,
    pub(crate) keep_unlinked: bool,
}

impl Default for Rules {
    /// Clients of the same host are their users, also root, which can read the files anyway. Others are refused.
    fn default() -> Rules {
        Rules { local: Permitted::ReadWrite, remote: Vec::new(), squash: None, keep_unlinked: false }
    }
}

impl Rules {
    /// Reads a file of rules.
    ///
    /// # Errors
    /// See [`RulesError`].
    pub fn load(path: &Path) -> Result<Rules, RulesError> {
        std::fs::read_to_string(path)?.parse()
    }

    fn of(file: File) -> Result<Rules, RulesError> {
        let squash = match (file.root, file.squash) {
            (true, _) => None,
            (false, name) => Some(Identity::of_user(&user(name.as_deref().unwrap_or("nobody"))?, false)),
        };
        let remote = file.remote.iter().map(|rule| {
            let from = rule.from.parse()?;
            let identity = match rule.access {
                Permitted::None => None,
                access => Some(Identity::of_user(&user(&rule.user)?, access == Permitted::ReadOnly)),
            };
            Ok(Remote { from, identity })
        });
        let remote = remote.collect::<Result<_, RulesError>>()?;
        Ok(Rules { local: file.local.access, remote, squash, keep_unlinked: file.keep_unlinked })
    }

    /// The user for a client of the same host whose process has these numbers by the kernel's word. `None` if it is refused.
    pub(crate) fn local(&self, uid: u32, gid: u32, groups: Vec<u32>) -> Option<Identity> {
        let is_read_only = match self.local {
            Permitted::None => return None,
            access => access == Permitted::ReadOnly,
        };
        Some(self.squashed(Identity { uid, gid, groups, is_read_only }))
    }

    /// The user for a client at an address. `None` if it is refused.
    pub(crate) fn remote(&self, address: IpAddr) -> Option<Identity> {
        let rule = self.remote.iter().find(|rule| rule.from.contains(address))?;
        Some(self.squashed(rule.identity.clone()?))
    }

    fn squashed(&self, identity: Identity) -> Identity {
        match &self.squash {
            Some(squash) if identity.uid == 0 => {
                Identity { is_read_only: identity.is_read_only, ..squash.clone() }
            }
            _ => identity,
        }
    }
}

impl std::str::FromStr for Rules {
    type Err = RulesError;

    fn from_str(text: &str) -> Result<Rules, RulesError> {
        Rules::of(toml::from_str(text)?)
    }
}

/// The user with a name or number.
fn user(name: &str) -> Result<User, RulesError> {
    let unknown = || RulesError::Value { what: "no user", value: name.into() };
    let found = match name.parse() {
        Ok(uid) => User::from_uid(Uid::from_raw(uid)),
        Err(_) => User::from_name(name),
    };
    found.ok().flatten().ok_or_else(unknown)
}

/// A prefix of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Prefix {
    address: IpAddr,
    bits: u32,
}

impl Prefix {
    fn contains(self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(prefix), IpAddr::V4(address)) => {
                let differing = prefix.to_bits() ^ address.to_bits();
                differing.leading_zeros() >= self.bits
            }
            (IpAddr::V6(prefix), IpAddr::V6(address)) => {
                let differing = prefix.to_bits() ^ address.to_bits();
                differing.leading_zeros() >= self.bits
            }
            _ => false,
        }
    }
}

impl std::str::FromStr for Prefix {
    type Err = RulesError;

    fn from_str(text: &str) -> Result<Prefix, RulesError> {
        let invalid = || RulesError::Value { what: "no address or prefix", value: text.into() };
        let (address, bits) =
            text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let bits_max = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(bits_max), str::parse).map_err(|_| invalid())?;
        if bits > bits_max {
            return Err(invalid());
        }
        Ok(Prefix { address, bits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        keep_unlinked = true
        [local]
        access = "ro"
        [[remote]]
        from = "192.0.2.7"
        user = "root"
        access = "none"
        [[remote]]
        from = "192.0.2.0/24"
        user = "root"
    "#;

    #[test]
    fn the_first_matching_rule_counts() {
        let rules: Rules = TEXT.parse().unwrap();
        assert!(rules.keep_unlinked);
        assert_eq!(rules.remote("192.0.2.7".parse().unwrap()), None);
        assert_eq!(rules.remote("192.0.3.1".parse().unwrap()), None);
        let identity = rules.remote("::ffff:192.0.2.8".parse().unwrap()).unwrap();
        assert!(!identity.is_read_only);
        assert_ne!(identity.uid, 0, "root is squashed");
    }

    #[test]
    fn local_clients_are_their_users() {
        let rules: Rules = TEXT.parse().unwrap();
        let identity = rules.local(12345, 54321, vec![77]).unwrap();
        assert_eq!((identity.uid, identity.gid, identity.is_read_only), (12345, 54321, true));
        assert_eq!(identity.groups, [77]);
        assert_ne!(rules.local(0, 0, vec![0]).unwrap().uid, 0);
        assert_eq!("[local]\naccess = \"none\"".parse::<Rules>().unwrap().local(1, 1, Vec::new()), None);
    }

    #[test]
    fn invalid_rules_are_refused() {
        for text in [
            "unknown = 1",
            "[[remote]]\nfrom = \"192.0.2.0/33\"\nuser = \"root\"",
            "[[remote]]\nfrom = \"x\"\nuser = \"root\"",
            "[[remote]]\nfrom = \"::1\"\nuser = \"no such user\"",
            "squash = \"no such user\"",
        ] {
            assert!(text.parse::<Rules>().is_err(), "{text}");
        }
    }
}
