//! How a memory node allocates pages and how clients reach them: by chains, or in one of the ways that ODRP is compared with.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::page_store::PAGE_BYTES;

/// The scheme of a memory node. All but the first are baselines for comparison (sections 2.2 and 5.1 of the ODRP paper).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scheme {
    /// The NIC allocates and copies pages, by chains of work requests.
    #[default]
    #[serde(rename = "odrp")]
    Odrp,
    /// The client's whole space is reserved when it connects. It loads and stores by one-sided READs and WRITEs.
    #[serde(rename = "static")]
    Static,
    /// The node's processor allocates slabs of 1 MiB, on request. Loads and stores are one-sided.
    #[serde(rename = "dynamic-1m")]
    Dynamic1M,
    /// The same with slabs of a page.
    #[serde(rename = "dynamic-4k")]
    Dynamic4K,
    /// The node's processor allocates pages and copies them, on request.
    #[serde(rename = "two-sided")]
    TwoSided,
}

impl Scheme {
    /// All of them.
    pub const ALL: [Scheme; 5] =
        [Scheme::Odrp, Scheme::Static, Scheme::Dynamic1M, Scheme::Dynamic4K, Scheme::TwoSided];

    /// The name, as options and the protocol have it.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Odrp => "odrp",
            Scheme::Static => "static",
            Scheme::Dynamic1M => "dynamic-1m",
            Scheme::Dynamic4K => "dynamic-4k",
            Scheme::TwoSided => "two-sided",
        }
    }

    /// Pages that the node's processor allocates at a time; `None` for [`Scheme::Static`].
    pub(crate) fn slab_pages(self) -> Option<u64> {
        match self {
            Scheme::Static => None,
            Scheme::Dynamic1M => Some((1 << 20) / PAGE_BYTES as u64),
            Scheme::Odrp | Scheme::Dynamic4K | Scheme::TwoSided => Some(1),
        }
    }

    /// Queue pairs between a client and its node.
    pub(crate) fn connection_count(self) -> usize {
        if self == Scheme::Odrp { crate::protocol::Function::ALL.len() } else { 1 }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(name: &str) -> Result<Scheme, String> {
        let found = Scheme::ALL.into_iter().find(|scheme| scheme.name() == name);
        found.ok_or_else(|| format!("no scheme is named {name:?}"))
    }
}
