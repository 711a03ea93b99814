//! A minimal HTTP server for metrics: one GET per connection.
//!
//! One thread serves all connections. A client that sends no request, or does not drain the response, is disconnected
//! after a time limit. When the maximum of connections is reached, a new one replaces the oldest. So clients determine
//! neither the number of threads nor the memory.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// The most connections. A further one replaces the oldest.
const CONNECTIONS_MAX: usize = 32;
/// The time limit of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest request in bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// The pause in accepting connections when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);

/// The answer to a request for a path.
pub(crate) struct Answer {
    /// Status code and reason phrase.
    pub status: &'static str,
    pub content_type: &'static str,
    pub body: String,
}

/// An HTTP server, which stops when it is dropped.
pub(crate) struct HttpServer {
    addr: SocketAddr,
    /// An eventfd that ends the thread.
    shutdown: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// Listens at an address; port 0 chooses a free one.
    ///
    /// # Errors
    /// If it cannot listen there, or there are no threads or descriptors.
    pub fn serve(
        addr: SocketAddr,
        answer: impl Fn(&str) -> Answer + Send + 'static,
    ) -> io::Result<HttpServer> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let shutdown = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let signalled = shutdown.clone();
        let builder = std::thread::Builder::new().name("terrace-metrics".into());
        let thread = builder.spawn(move || run(&listener, &signalled, &answer))?;
        Ok(HttpServer { addr, shutdown, thread: Some(thread) })
    }

    /// The listening address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        // The write wakes the thread; it cannot fail, since the counter does not overflow.
        let _ = rustix::io::write(&*self.shutdown, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves connections until the eventfd is signalled.
fn run(listener: &TcpListener, shutdown: &OwnedFd, answer: &dyn Fn(&str) -> Answer) {
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        let mut fds = vec![PollFd::new(shutdown, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        fds.extend(connections.iter().map(|one| PollFd::new(&one.stream, one.poll_flags())));
        let timeout = connections
            .first()
            .map(|oldest| timespec(CONNECTION_TIMEOUT.saturating_sub(oldest.since.elapsed())));
        // The only possible error is a lack of memory; the poll is repeated.
        let _ = poll(&mut fds, timeout.as_ref());
        let [is_shutdown, is_acceptable] = [0, 1].map(|index| !fds[index].revents().is_empty());
        drop(fds);
        if is_shutdown {
            return;
        }
        connections.retain_mut(|one| one.since.elapsed() < CONNECTION_TIMEOUT && one.advance(answer));
        if is_acceptable {
            accept_connections(listener, &mut connections);
        }
    }
}

/// Accepts up to `CONNECTIONS_MAX` connections.
fn accept_connections(listener: &TcpListener, connections: &mut Vec<Connection>) {
    for _ in 0..CONNECTIONS_MAX {
        match listener.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                if connections.len() == CONNECTIONS_MAX {
                    connections.remove(0);
                }
                connections.push(Connection {
                    stream,
                    since: Instant::now(),
                    request: Vec::new(),
                    answer: None,
                });
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            // The listener stays readable, so that this thread would spin.
            Err(_) => return std::thread::sleep(PAUSE),
        }
    }
}

struct Connection {
    stream: TcpStream,
    since: Instant,
    /// The bytes received so far.
    request: Vec<u8>,
    /// The response, and the number of bytes sent.
    answer: Option<(Vec<u8>, usize)>,
}

impl Connection {
    /// The event that the connection waits for.
    fn poll_flags(&self) -> PollFlags {
        if self.answer.is_some() { PollFlags::OUT } else { PollFlags::IN }
    }

    /// Reads and writes as far as possible. False if the connection is to be closed.
    fn advance(&mut self, answer: &dyn Fn(&str) -> Answer) -> bool {
        if self.answer.is_none() {
            match self.receive() {
                Ok(true) => self.answer = Some((render_answer(&self.request, answer), 0)),
                Ok(false) => return true,
                Err(_) => return false,
            }
        }
        let Some((bytes, sent)) = &mut self.answer else { return true };
        while *sent < bytes.len() {
            match self.stream.write(&bytes[*sent..]) {
                Ok(0) => return false,
                Ok(count) => *sent += count,
                Err(error) => return is_retryable(&error),
            }
        }
        false
    }

    /// Receives bytes. True if the whole request has arrived.
    fn receive(&mut self) -> io::Result<bool> {
        let mut chunk = [0; 1024];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.request.extend_from_slice(&chunk[..count]),
                Err(error) if is_retryable(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
            if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
                return Ok(true);
            }
            if self.request.len() > REQUEST_BYTES_MAX {
                return Err(ErrorKind::FileTooLarge.into());
            }
        }
    }
}

/// Whether the operation is to be repeated later.
fn is_retryable(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The response to a request.
fn render_answer(request: &[u8], answer: &dyn Fn(&str) -> Answer) -> Vec<u8> {
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = std::str::from_utf8(line).unwrap_or_default().split(' ');
    let Answer { status, content_type, body } = match (words.next(), words.next()) {
        (Some("GET"), Some(path)) => answer(path),
        _ => Answer { status: "400 Bad Request", content_type: "text/plain", body: "only GET\n".into() },
    };
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

fn timespec(duration: Duration) -> Timespec {
    // A little longer, so that the limit has passed when `poll` returns.
    let duration = duration + Duration::from_millis(1);
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn server() -> HttpServer {
        let answer = |path: &str| match path {
            "/long" => Answer { status: "200 OK", content_type: "text/plain", body: "x".repeat(8 << 20) },
            path => {
                Answer { status: "404 Not Found", content_type: "text/plain", body: format!("no {path}\n") }
            }
        };
        HttpServer::serve((Ipv4Addr::LOCALHOST, 0).into(), answer).expect("a server")
    }

    fn fetch(server: &HttpServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.addr()).expect("a connection");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    }

    #[test]
    fn a_get_gets_the_whole_response() {
        let server = server();
        let text = fetch(&server, "GET /a HTTP/1.1\r\nHost: b\r\n\r\n");
        assert!(
            text.starts_with("HTTP/1.1 404 Not Found\r\n") && text.ends_with("\r\n\r\nno /a\n"),
            "{text}"
        );
        assert!(fetch(&server, "GET /long HTTP/1.0\r\n\r\n").ends_with("xxxx"));
        assert!(fetch(&server, "POST /a HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn idle_connections_are_replaced() {
        let server = server();
        let silent: Vec<TcpStream> =
            (0..200).map(|_| TcpStream::connect(server.addr()).expect("a connection")).collect();
        assert!(fetch(&server, "GET /a HTTP/1.1\r\n\r\n").ends_with("no /a\n"));
        // A client that does not drain its response.
        let slow = TcpStream::connect(server.addr()).expect("a connection");
        (&slow).write_all(b"GET /long HTTP/1.1\r\n\r\n").expect("sent");
        assert!(fetch(&server, "GET /a HTTP/1.1\r\n\r\n").ends_with("no /a\n"));
        drop(silent);
    }

    #[test]
    fn endless_requests_are_disconnected() {
        let server = server();
        let mut stream = TcpStream::connect(server.addr()).expect("a connection");
        let sent = (0..10_000).all(|_| stream.write_all(&[b'x'; 1024]).is_ok());
        assert!(!sent, "a request of 10 MB was accepted");
    }
}
