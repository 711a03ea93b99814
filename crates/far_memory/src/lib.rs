//! Far memory: pages of 4 KiB on memory nodes that other hosts' clients load and store, after ODRP ("On-Demand Remote Paging
//! with Programmable RDMA"). The node's NIC allocates, maps, copies and frees pages by chains of work requests; the node's
//! processor takes no part.
//!
//! | module | contains |
//! |---|---|
//! | `page_store` | what users see: [`PageStore`], [`PageError`] |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod page_store;

pub use page_store::{PAGE_BYTES, Page, PageError, PageStore};
