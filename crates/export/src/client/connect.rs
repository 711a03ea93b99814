//! Connecting to a server.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_nic::Device;

use super::buffers::Buffers;
use super::interrupt;
use super::session::{DEPTH, NewSession, Session};
use super::stream::Stream;
use crate::ends::{Domain, Ends, address_of, gid_for, path_to};
use crate::error::ExportError;
use crate::proto::{SetupAnswer, SetupRequest};

/// Entries of the completion queue of the control queue pair: receives, sends, and their flushes.
const CONTROL_DEPTH: u32 = 4096;
/// The most time for one attempt.
const ATTEMPT_TIME: Duration = Duration::from_secs(5);

/// Connects a session of the client with this number ([`SetupRequest::client`]).
///
/// # Errors
/// `NoExport`, `Refused`, `Protocol`, `Nic` or `Interrupted`.
pub fn connect(
    device: &Arc<Device>,
    server: SocketAddr,
    serial: u64,
    client: u64,
    deadline: Instant,
) -> Result<Arc<Session>, ExportError> {
    let gid = gid_for(device, server.ip())
        .ok_or(ExportError::Nic(terrace_nic::Error::Invalid("no local address of the server's family")))?;
    let timeout =
        deadline.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(10), ATTEMPT_TIME);
    let no_export = |reason| ExportError::NoExport { addr: server, reason };
    let mut stream = Stream::connect(server, address_of(gid), timeout).map_err(no_export)?;
    let mut domain = Domain::new(device)?;
    let (control_cq, data_cq) =
        (domain.create_cq(device, CONTROL_DEPTH)?, domain.create_cq(device, 8 * DEPTH)?);
    let ends = Ends::new(&domain.pd, &control_cq, &data_cq, DEPTH)?;
    let request = SetupRequest { ends: ends.describe(gid), client };
    let connected = exchange(&mut stream, server, &request, timeout)
        .and_then(|settings| Ok((connect_ends(device, &ends, &settings)?, settings)));
    let (path, settings) = connected.inspect_err(|_| ends.close())?;
    let buffers = Buffers::new(&domain.pd).inspect_err(|_| ends.close())?;
    let Ends { control, data, append } = ends;
    let device = device.clone();
    Ok(Session::new(NewSession {
        device,
        domain: Arc::new(domain),
        control_cq,
        data_cq,
        control,
        data,
        append,
        path,
        stream,
        settings,
        buffers,
        serial,
    }))
}

/// Sends the setup, and receives the answer.
fn exchange(
    stream: &mut Stream,
    server: SocketAddr,
    request: &SetupRequest,
    timeout: Duration,
) -> Result<SetupAnswer, ExportError> {
    let no_export = |reason| ExportError::NoExport { addr: server, reason };
    let deadline = Instant::now() + timeout;
    stream.send(request).map_err(no_export)?;
    let rest = || interrupt::next_check(deadline).saturating_duration_since(Instant::now());
    while !stream.is_readable_within(rest()) {
        interrupt::check()?;
        if Instant::now() >= deadline {
            return Err(no_export(io::ErrorKind::TimedOut.into()));
        }
    }
    match stream.receive() {
        Ok(settings) if settings.errno != 0 => Err(ExportError::Refused(settings.errno.into())),
        Ok(settings) => Ok(settings),
        Err(error) if error.kind() == ErrorKind::InvalidData => Err(ExportError::Protocol),
        Err(error) => Err(no_export(error)),
    }
}

fn connect_ends(
    device: &Device,
    ends: &Ends,
    settings: &SetupAnswer,
) -> Result<terrace_nic::Path, ExportError> {
    if settings.requests_max == 0 || settings.lease_ms == 0 {
        return Err(ExportError::Protocol);
    }
    let path = path_to(device, settings.ends.gid, settings.ends.control.qpn)?;
    ends.control.connect(path, settings.ends.control)?;
    // The server accesses nothing of the client.
    ends.data.connect(path, settings.ends.data, 0)?;
    ends.append.connect(path, settings.ends.append, 0)?;
    Ok(path)
}
