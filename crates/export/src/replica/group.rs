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

/// Begins an access of each copy, and then waits for all.
fn each<'a, P, T>(
    copies: &'a [Replica],
    deadline: Instant,
    begin: impl Fn(&'a Replica) -> Result<P, Failure>,
    finish: impl Fn(&'a Replica, P) -> Result<T, Failure>,
) -> Outcomes<T> {
    let begun: Vec<_> = copies.iter().map(begin).collect();
    let ended = begun.into_iter().zip(copies);
    ended
        .map(|(begun, copy)| {
            begun.and_then(|begun| finish(copy, begun)).map_err(|failure| fault(copy, failure, deadline))
        })
        .collect()
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
pub fn write(copies: &[Replica], offset: u64, data: &[u8], deadline: Instant) -> Outcomes<()> {
    each(
        copies,
        deadline,
        |copy| Access::begin(&copy.opening, offset, Bytes::From(data), deadline),
        |_, access| access.finish(deadline),
    )
}

/// APPENDs a record to each copy. Returns the offsets.
pub fn append(copies: &[Replica], record: &[u8], commit: bool, deadline: Instant) -> Outcomes<u64> {
    each(
        copies,
        deadline,
        |copy| Append::begin(&copy.opening, record, commit, deadline),
        |_, append| append.finish(deadline),
    )
}

/// Makes what was acknowledged persistent at each copy.
pub fn commit(copies: &[Replica], deadline: Instant) -> Outcomes<()> {
    each(copies, deadline, |copy| Commit::begin(&copy.opening, deadline), |_, commit| commit.finish(deadline))
}

/// Sends each copy a request about its open file, whose number the request is made of.
pub fn change(
    copies: &[Replica],
    deadline: Instant,
    request: impl Fn(u64) -> Request,
) -> Outcomes<Attributes> {
    each(
        copies,
        deadline,
        |copy| Ok(copy.opening.session.send(request(copy.opening.open), deadline)?),
        |copy, sent| match copy.opening.session.wait_answer(sent, deadline)? {
            Answer::Attributes { attributes } => Ok(attributes),
            Answer::Failed { errno: UNKNOWN_OPEN } => Err(ExportError::Revoked.into()),
            Answer::Failed { errno } => Err(ExportError::Os(errno.into()).into()),
            _ => Err(ExportError::Protocol.into()),
        },
    )
}

/// READs bytes that the copies have, from the first one; if it fails, or has not answered after half of the time, from all
/// others. The result is the first copy's that has them.
///
/// # Errors
/// The last copy's, if all fail.
pub fn read(copies: &[Replica], offset: u64, into: &mut [u8], timeout: Duration) -> Result<(), ExportError> {
    let mut parts = into.chunks_mut(IN_FLIGHT_MAX).zip((offset..).step_by(IN_FLIGHT_MAX));
    parts.try_for_each(|(part, at)| read_part(copies, at, part, timeout))
}

fn read_part(copies: &[Replica], offset: u64, into: &mut [u8], timeout: Duration) -> Result<(), ExportError> {
    let begun = Instant::now();
    let (half, end) = (begun + timeout / 2, begun + timeout);
    let Some((first, others)) = copies.split_first() else { return Err(ExportError::Lost) };
    let deadline = if others.is_empty() { end } else { half };
    let read = |copy: &Replica, into: &mut [u8], deadline| {
        let access = Access::begin(&copy.opening, offset, Bytes::Into(into), deadline);
        let read = access.and_then(|access| access.finish(deadline));
        read.map_err(|failure| fault(copy, failure, deadline).error())
    };
    let mut result = read(first, into, deadline);
    if result.is_ok() || others.is_empty() {
        return result;
    }
    let mut buffers: Vec<Vec<u8>> = others.iter().map(|_| vec![0; into.len()]).collect();
    let accesses: Vec<_> = others
        .iter()
        .zip(&mut buffers)
        .map(|(copy, buffer)| Access::begin(&copy.opening, offset, Bytes::Into(buffer), end))
        .collect();
    let mut has_read = None;
    for (place, (access, copy)) in accesses.into_iter().zip(others).enumerate() {
        let read = access.and_then(|access| access.finish(end));
        match read.map_err(|failure| fault(copy, failure, end).error()) {
            Ok(()) => has_read = has_read.or(Some(place)),
            Err(error) => result = Err(error),
        }
    }
    match has_read {
        Some(place) => {
            into.copy_from_slice(&buffers[place]);
            Ok(())
        }
        None => result,
    }
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
