//! Applications: the steps of one access, and the content of the region that they need.

mod model;
mod table;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use model::Model;
pub use table::{KEYS_BYTES, Place, Table, TableError, VALUE_BYTES};

use crate::content::{self, Stamp};

/// The application that the clients run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Application {
    /// READs and WRITEs of blocks at offsets that the client knows.
    #[default]
    Blocks,
    /// A file system, as Octopus (USENIX ATC'17): the client requests the file's address from the server by RPC, then
    /// READs or WRITEs a block of the file. The server's answer to [`terrace_node::Client::request_address`] is the
    /// metadata.
    FileSystem,
    /// An ordered key-value store, as XStore (OSDI'20): the client predicts the leaf of a key by a [`Model`], READs the
    /// leaf's keys, then READs the key's value. See [`Table`].
    KeyValueStore,
}

impl Application {
    /// The number of keys in a region. Of blocks, they are its whole access-sized pieces.
    pub fn key_count(self, region_bytes: u64, access_bytes: u64) -> u64 {
        match self {
            Application::Blocks | Application::FileSystem => region_bytes / access_bytes,
            Application::KeyValueStore => Table::new(region_bytes).key_count(),
        }
    }

    /// The ranges of the region that an access to `key` READs or WRITEs, if the model's prediction is right.
    pub fn ranges(self, key: u64, access_bytes: u64) -> impl Iterator<Item = Range<u64>> {
        let (lookup, data) = match self {
            Application::Blocks | Application::FileSystem => (None, key * access_bytes),
            Application::KeyValueStore => {
                let keys = Table::keys_offset(Table::leaf_of(key));
                (Some(keys..keys + KEYS_BYTES as u64), Table::value_offset(key))
            }
        };
        lookup.into_iter().chain(Some(data..data + access_bytes))
    }

    /// Whether a lookup READs the region, beside the READ or WRITE of the data.
    pub fn looks_up_by_read(self) -> bool {
        self == Application::KeyValueStore
    }

    /// Fills `bytes`, at `offset` of a region of `region_bytes`, with the content before the first access.
    pub fn fill(self, bytes: &mut [u8], offset: u64, region_bytes: u64) {
        match self {
            Application::Blocks | Application::FileSystem => content::fill(bytes, offset, Stamp::INITIAL),
            Application::KeyValueStore => Table::new(region_bytes).fill(bytes, offset),
        }
    }
}

impl fmt::Display for Application {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Application::Blocks => "blocks",
            Application::FileSystem => "file-system",
            Application::KeyValueStore => "key-value-store",
        })
    }
}

impl std::str::FromStr for Application {
    type Err = String;

    fn from_str(text: &str) -> Result<Application, String> {
        let value = toml::Value::String(text.to_owned());
        Application::deserialize(value).map_err(|error| error.message().to_owned())
    }
}

/// A key-value store's table and the client's model of it, which all client threads share.
#[derive(Debug)]
pub struct Store {
    /// The table in the region.
    pub table: Table,
    /// The model of the table.
    pub model: Model,
}

impl Store {
    /// The store of a region, with a trained model.
    pub fn new(region_bytes: u64) -> Store {
        let table = Table::new(region_bytes);
        let model = Model::train((0..table.leaf_count()).map(|leaf| table.first_key(leaf)));
        Store { table, model }
    }

    /// The leaf that the model predicts for the key with this index.
    pub fn predict(&self, index: u64) -> u64 {
        self.model.predict(self.table.key(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_plans() {
        for application in [Application::Blocks, Application::FileSystem, Application::KeyValueStore] {
            assert_eq!(application.to_string().parse(), Ok(application));
        }
        assert!("database".parse::<Application>().unwrap_err().contains("database"));
    }

    #[test]
    fn an_access_to_a_key_reads_its_leafs_keys_and_its_value() {
        let ranges: Vec<_> = Application::KeyValueStore.ranges(17, 128).collect();
        assert_eq!(ranges, [2176..2304, 2176 + 128 + 128..2176 + 128 + 256]);
        assert!(Application::FileSystem.ranges(17, 4096).eq(Some(17 * 4096..18 * 4096)));
    }

    #[test]
    fn most_predictions_of_a_large_table_are_right() {
        let store = Store::new(64 << 20);
        let keys = store.table.key_count();
        let wrong = (0..keys).filter(|&key| store.predict(key) != Table::leaf_of(key)).count();
        assert!((wrong as f64) < 0.25 * keys as f64, "{wrong} of {keys} predictions are wrong");
    }
}
