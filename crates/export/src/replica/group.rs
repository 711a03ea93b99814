//! The same access to several copies at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_sync::Mutex;

use super::site::Replica;
use crate::client::data::{Access, Append, Bytes, Commit, Failure, IN_FLIGHT_MAX};
use crate::error::{ExportError, UNKNOWN_OPEN};
use crate::proto::{Answer, Attributes, Request};

/// Why a copy has not done what it was to do.
#[derive(Debug)]
pub enum Fault {
    /// It has refused, and can be asked again.
    Refused(ExportError),
    /// It is lost.
    Lost(ExportError),
}

impl Fault {
    pub fn error(self) -> ExportError {
        match self {
            Fault::Refused(error) | Fault::Lost(error) => error,
        }
    }
}

/// What the copies have done, in their order.
pub type Outcomes<T> = Vec<Result<T, Fault>>;

/// Begins an access of each copy, and then waits for all: for this time, and for as long again if copies have refused it.
fn each<'a, P, T>(
    copies: &'a [Replica],
    timeout: Duration,
    begin: impl Fn(&'a Replica, Instant) -> Result<P, Failure>,
    finish: impl Fn(&'a Replica, P, Instant) -> Result<T, Failure>,
) -> Outcomes<T> {
    let deadline = Instant::now() + timeout;
    let begun: Vec<_> = copies.iter().map(|copy| begin(copy, deadline)).collect();
    let ended = begun.into_iter().zip(copies);
    let ended: Vec<_> =
        ended.map(|(begun, copy)| begun.and_then(|begun| finish(copy, begun, deadline))).collect();
    // One that has not answered has taken all of the time, and those that have refused are there.
    let deadline = Instant::now() + timeout;
    let ended = ended.into_iter().zip(copies);
    ended.map(|(ended, copy)| ended.map_err(|failure| fault(copy, failure, deadline))).collect()
}

/// Makes a copy that has refused an access ready for the next one.
pub fn fault(copy: &Replica, failure: Failure, deadline: Instant) -> Fault {
    match failure {
        Failure::Refused { kind, generation, status } => {
            match copy.opening.session.repair(kind.link(), generation, deadline) {
                Ok(()) => Fault::Refused(ExportError::Access(kind, status)),
                Err(error) => Fault::Lost(error),
            }
        }
        Failure::Error(error @ ExportError::Os(_)) => Fault::Refused(error),
        Failure::Error(error) => Fault::Lost(error),
    }
}

/// WRITEs bytes to each copy, which is long enough: up to [`IN_FLIGHT_MAX`], so that all copies have all of them on the way
/// while the first is waited for.
pub fn write(copies: &[Replica], offset: u64, data: &[u8], timeout: Duration) -> Outcomes<()> {
    each(
        copies,
        timeout,
        |copy, deadline| Access::begin(&copy.opening, offset, Bytes::From(data), deadline),
        |_, access, deadline| access.finish(deadline),
    )
}

/// APPENDs a record to each copy. Returns the offsets.
pub fn append(copies: &[Replica], record: &[u8], commit: bool, timeout: Duration) -> Outcomes<u64> {
    each(
        copies,
        timeout,
        |copy, deadline| Append::begin(&copy.opening, record, commit, deadline),
        |_, append, deadline| append.finish(deadline),
    )
}

/// Makes what was acknowledged persistent at each copy.
pub fn commit(copies: &[Replica], timeout: Duration) -> Outcomes<()> {
    each(
        copies,
        timeout,
        |copy, deadline| Commit::begin(&copy.opening, deadline),
        |_, commit, deadline| commit.finish(deadline),
    )
}

/// Sends each copy a request about its open file, whose number the request is made of.
pub fn change(
    copies: &[Replica],
    timeout: Duration,
    request: impl Fn(u64) -> Request,
) -> Outcomes<Attributes> {
    each(
        copies,
        timeout,
        |copy, deadline| Ok(copy.opening.session.send(request(copy.opening.open), deadline)?),
        |copy, sent, deadline| match copy.opening.session.wait_answer(sent, deadline)? {
            Answer::Attributes { attributes } => Ok(attributes),
            Answer::Failed { errno: UNKNOWN_OPEN } => Err(ExportError::Revoked.into()),
            Answer::Failed { errno } => Err(ExportError::Os(errno.into()).into()),
            _ => Err(ExportError::Protocol.into()),
        },
    )
}

/// READs bytes that the copies have, from the first one; if it fails, or has not answered after half of the time, from all
/// others, too. Each copy has all of the time. The result is the first copy's that has them.
///
/// # Errors
/// The last copy's, if all fail.
pub fn read(copies: &[Replica], offset: u64, into: &mut [u8], timeout: Duration) -> Result<(), ExportError> {
    let mut parts = into.chunks_mut(IN_FLIGHT_MAX).zip((offset..).step_by(IN_FLIGHT_MAX));
    parts.try_for_each(|(part, at)| read_part(copies, at, part, timeout))
}

fn read_part(copies: &[Replica], offset: u64, into: &mut [u8], timeout: Duration) -> Result<(), ExportError> {
    let Some((first, others)) = copies.split_first() else { return Err(ExportError::Lost) };
    let (begun, len) = (Instant::now(), into.len());
    let end = begun + timeout;
    let access = Access::begin(&first.opening, offset, Bytes::Into(into), end);
    let is_late = |access: &Access<'_>| !others.is_empty() && !access.wait_ended(begun + timeout / 2);
    let is_late = access.as_ref().is_ok_and(is_late);
    // The first one goes on meanwhile: it has all of the time.
    let by_others = is_late.then(|| read_all(others, offset, len, timeout));
    let read = access.and_then(|access| access.finish(end));
    match read.map_err(|failure| fault(first, failure, Instant::now() + timeout).error()) {
        Err(_) if !others.is_empty() => {
            let found = by_others.unwrap_or_else(|| read_all(others, offset, len, timeout))?;
            into.copy_from_slice(&found);
            Ok(())
        }
        read => read,
    }
}

/// READs bytes from all of some copies at once. The result is the first copy's that has them.
fn read_all(copies: &[Replica], offset: u64, len: usize, timeout: Duration) -> Result<Vec<u8>, ExportError> {
    let mut buffers: Vec<_> = copies.iter().map(|_| vec![0; len]).collect();
    let deadline = Instant::now() + timeout;
    let begun = copies.iter().zip(&mut buffers);
    let begun =
        begun.map(|(copy, buffer)| Access::begin(&copy.opening, offset, Bytes::Into(buffer), deadline));
    let begun: Vec<_> = begun.collect();
    let ended = begun.into_iter().map(|access| access.and_then(|access| access.finish(deadline)));
    let ended: Vec<_> = ended.collect();
    let deadline = Instant::now() + timeout;
    let read = ended.into_iter().zip(copies).zip(buffers).map(|((ended, copy), buffer)| match ended {
        Ok(()) => Ok(buffer),
        Err(failure) => Err(fault(copy, failure, deadline).error()),
    });
    // Each of them, so that all that have refused are ready for the next access.
    let read: Vec<_> = read.collect();
    read.into_iter().reduce(Result::or).unwrap_or(Err(ExportError::Lost))
}

/// Calls `act` with each item, all at once.
pub fn in_parallel<T: Send, R: Send>(items: Vec<T>, act: impl Fn(T) -> R + Sync) -> Vec<R> {
    let act = &act;
    std::thread::scope(|scope| {
        let started: Vec<_> = items
            .into_iter()
            .map(|item| {
                let slot = Arc::new(Mutex::new(Some(item)));
                let own = slot.clone();
                let run = move || {
                    let item = own.lock().take();
                    item.map(act)
                };
                let thread = std::thread::Builder::new().name("terrace-replica".into());
                (slot, thread.spawn_scoped(scope, run))
            })
            .collect();
        // Without a thread the caller does it itself.
        let ended = started.into_iter().filter_map(|(slot, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => {
                let item = slot.lock().take();
                item.map(act)
            }
        });
        ended.collect()
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::RwLock;

    use terrace_nic::{PathChoice, PortConfig};

    use super::*;
    use crate::client::{ClientConfig, data};
    use crate::replica::{ReplicaConfig, ReplicatedFile};
    use crate::server::{Server, ServerConfig};

    const TIMEOUT: Duration = Duration::from_secs(3);

    /// Three exports and a replicated file of 4 KiB.
    fn start() -> (Vec<(tempfile::TempDir, Server)>, ReplicatedFile) {
        let address = Some(Ipv4Addr::LOCALHOST.into());
        let port = PortConfig { address, path: PathChoice::Udp, ..PortConfig::default() };
        let serve = || {
            let directory = tempfile::tempdir().unwrap();
            let config = ServerConfig::new(directory.path().into(), (Ipv4Addr::LOCALHOST, 0).into());
            (directory, Server::open(&ServerConfig { port: port.clone(), ..config }).unwrap())
        };
        let exports: Vec<_> = (0..3).map(|_| serve()).collect();
        let client =
            |server: &Server| ClientConfig { port: port.clone(), ..ClientConfig::new(server.address()) };
        let clients = exports.iter().map(|(_, server)| client(server));
        let config = ReplicaConfig { timeout: TIMEOUT, ..ReplicaConfig::new(clients, "file") };
        let mut file = ReplicatedFile::create(&config, 0o644).unwrap();
        file.append_commit(&[1; 4096]).unwrap();
        (exports, file)
    }

    #[test]
    fn members_that_refuse_stay_although_another_one_has_taken_all_of_the_time() {
        let (_exports, file) = start();
        let copies = &file.writer.copies;
        let access = |copy: &'_ Replica, deadline: Instant| {
            let beyond = data::access(&copy.opening, 8192, Bytes::From(b"x"), deadline);
            assert!(matches!(beyond, Err(Failure::Refused { .. })));
            Ok(beyond)
        };
        let finish = |copy: &Replica, refused: Result<(), Failure>, deadline: Instant| {
            if copy.id == copies[0].id {
                std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
                return Err(ExportError::Lost.into());
            }
            refused
        };
        let outcomes = each(copies, Duration::from_millis(500), access, finish);
        assert!(
            matches!(outcomes[..], [Err(Fault::Lost(_)), Err(Fault::Refused(_)), Err(Fault::Refused(_))]),
            "{outcomes:?}"
        );
    }

    #[test]
    fn a_member_that_answers_within_the_timeout_is_not_dropped() {
        let (exports, mut file) = start();
        let disk = Arc::new(RwLock::new(()));
        let occupied = disk.write().unwrap();
        for (_, server) in &exports {
            server.occupy_disk(&disk);
            server.write_by_workers(&[1; 4096]);
        }
        let mut bytes = [0; 4096];
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| file.read_at(0, &mut bytes));
            std::thread::sleep(TIMEOUT * 3 / 4);
            drop(occupied);
            assert_eq!(reading.join().unwrap().unwrap(), 4096);
        });
        assert_eq!(bytes, [1; 4096]);
        assert!(file.writer.copies.iter().all(|copy| !copy.opening.session.is_lost()));
        file.append_commit(b"more").unwrap();
        assert_eq!(file.status().members.len(), 3, "{:?}", file.status());
    }
}
