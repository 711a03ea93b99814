//! The files that a connection has looked up: it can name no others, so a client cannot guess its way past a directory
//! that it may not search.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use terrace_sync::Mutex;

use super::holdings::{Holder, Holding, Holdings};
use crate::proto::FileId;

/// Most files of a connection.
const NODES_MAX: usize = 4096;
/// A connection keeps so many also when its holder has all the descriptors that it can.
const NODES_MIN: usize = 16;

/// The files that a connection knows.
#[derive(Debug)]
pub struct Nodes {
    holdings: Arc<Holdings>,
    holder: Holder,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    files: HashMap<FileId, Node>,
    /// In the order in which they were looked up first.
    order: VecDeque<FileId>,
}

#[derive(Debug)]
struct Node {
    file: Arc<OwnedFd>,
    /// `None` for one of the [`NODES_MIN`] that its connection has in any case.
    _holding: Option<Holding>,
}

impl Nodes {
    /// None yet. The descriptors count as the holder's.
    pub fn new(holdings: Arc<Holdings>, holder: Holder) -> Nodes {
        Nodes { holdings, holder, known: Mutex::default() }
    }

    /// The file, if the connection knows it.
    pub fn get(&self, id: FileId) -> Option<Arc<OwnedFd>> {
        self.known.lock().files.get(&id).map(|node| node.file.clone())
    }

    /// Adds a file that the client has found. The oldest ones are forgotten; the client reclaims them.
    pub fn add(&self, id: FileId, file: OwnedFd) {
        let mut known = self.known.lock();
        let file = Arc::new(file);
        if let Some(node) = known.files.get_mut(&id) {
            node.file = file;
            return;
        }
        known.order.push_back(id);
        let mut holding = self.holdings.take(self.holder);
        while known.order.len() > if holding.is_some() { NODES_MAX } else { NODES_MIN } {
            let Some(oldest) = known.order.pop_front() else { break };
            known.files.remove(&oldest);
            holding = holding.or_else(|| self.holdings.take(self.holder));
        }
        known.files.insert(id, Node { file, _holding: holding });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds so many files, and returns how many of them are known then.
    fn add(nodes: &Nodes, count: u64) -> usize {
        for ino in 1..=count {
            nodes.add(FileId { ino, ..FileId::default() }, std::fs::File::open("/dev/null").unwrap().into());
        }
        nodes.known.lock().files.len()
    }

    #[test]
    fn a_holder_with_many_connections_leaves_others_their_share() {
        let holdings = Holdings::new(400);
        let connect = |uid| Nodes::new(holdings.clone(), Holder::User(uid));
        let all: Vec<_> = (0..10).map(|_| connect(1)).collect();
        let known: Vec<_> = all.iter().map(|nodes| add(nodes, 300)).collect();
        assert_eq!(known[0], 200);
        assert!(known[1..].iter().all(|known| *known == NODES_MIN), "{known:?}");
        let other = connect(2);
        assert!((90..=110).contains(&add(&other, 300)));
        // The first one gives back what is more than its share when it finds another file.
        assert!(add(&all[0], 301) < 160);
        drop((all, other));
        assert_eq!(add(&connect(3), 300), 200);
    }

    #[test]
    fn a_file_that_is_found_again_is_known_once() {
        let nodes = Nodes::new(Holdings::new(100), Holder::User(1));
        add(&nodes, 20);
        assert_eq!(add(&nodes, 20), 20);
        assert_eq!(nodes.known.lock().order.len(), 20);
    }
}
