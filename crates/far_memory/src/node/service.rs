//! What the control thread needs of a node, whatever its scheme.

use std::net::IpAddr;
use std::sync::mpsc::Sender;

use crate::protocol::{Connect, Connected};
use crate::status::NodeStatus;

/// A client that breaks the rules.
pub(crate) struct Expelled {
    pub id: u64,
    pub reason: String,
}

/// Refuses a client for which there is no place. Of each eight places, one is for an address that has no client: no host keeps
/// others out. `addresses` are those of clients, also of clients that have gone and still have memory.
pub(super) fn check_places(
    clients_max: usize,
    addresses: impl Iterator<Item = IpAddr>,
    newcomer: IpAddr,
) -> Result<(), String> {
    let (mut clients, mut of_newcomer) = (0, 0);
    for address in addresses {
        clients += 1;
        of_newcomer += usize::from(address.to_canonical() == newcomer.to_canonical());
    }
    let kept = if of_newcomer > 0 { clients_max / 8 } else { 0 };
    match clients < clients_max - kept {
        true => Ok(()),
        false if clients < clients_max => Err(format!(
            "the memory node has {clients} clients already, and keeps {kept} places for addresses that have none"
        )),
        false => Err(format!("the memory node has {clients_max} clients already")),
    }
}

/// Admits and removes clients.
pub(crate) trait Service: Send + Sync {
    /// Admits a client under this number, soon, and says what it is to know or why not.
    fn admit(&self, id: u64, connect: Box<Connect>, answer: Sender<Result<Connected, String>>);

    /// Removes a client, soon, and frees its pages.
    fn remove(&self, id: u64);

    /// Compares clients with the rules. Returns those to disconnect.
    fn monitor(&self) -> Vec<Expelled>;

    /// What there is, and who has it.
    fn status(&self) -> NodeStatus;

    /// Addresses and keys by which a client's chains write the pool: of the client that was admitted last.
    #[cfg(test)]
    fn pool_keys(&self) -> Vec<(u64, u32)> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_places_are_for_addresses_that_have_no_client() {
        let address = |number: u8| IpAddr::from([192, 0, 2, number]);
        let check = |clients_max, count, newcomer| {
            let addresses = (0..count).map(|_| address(1));
            check_places(clients_max, addresses, address(newcomer)).is_ok()
        };
        assert!(check(64, 55, 1) && !check(64, 56, 1));
        assert!(check(64, 63, 2) && !check(64, 64, 2));
        // A node for few clients has no such places.
        assert!(check(1, 0, 1) && check(7, 6, 1) && !check(7, 7, 1));
    }
}
