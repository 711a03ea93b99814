//! HTTP, as far as scraping metrics needs it: a GET, its answer, and the connection ends.
//!
//! One thread serves all connections. A client that sends nothing, or drains no answer, is disconnected after a time
//! limit, or sooner for newer connections when there are many: clients determine neither the number of threads nor the
//! memory.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Connections at a time. For one more, the oldest is closed.
const CONNECTIONS_MAX: usize = 32;
/// How long a connection may take from its beginning to its end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest request in bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// How long no connection is accepted when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);

/// The answer to a request for a path.
pub(crate) struct Answer {
    /// Code and phrase.
    pub status: &'static str,
    pub content_type: &'static str,
    pub body: String,
}

/// Answers requests until it is dropped.
pub(crate) struct HttpServer {
    addr: SocketAddr,
    /// An eventfd; signalled to end the thread.
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// Listens at an address; port 0 chooses a free one.
    ///
    /// When it cannot listen there, or there are no threads or descriptors.
    pub fn serve(
        addr: SocketAddr,
        answer: impl Fn(&str) -> Answer + Send + 'static,
    ) -> io::Result<HttpServer> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let rung = bell.clone();
        let builder = std::thread::Builder::new().name("terrace-metrics".into());
        let thread = builder.spawn(move || run(&listener, &rung, &answer))?;
        Ok(HttpServer { addr, bell, thread: Some(thread) })
    }

    /// The address that it listens at.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        // The counter cannot overflow by this, so the thread is woken.
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs until the eventfd is signalled.
fn run(listener: &TcpListener, bell: &OwnedFd, answer: &dyn Fn(&str) -> Answer) {
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        let mut fds = vec![PollFd::new(bell, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        fds.extend(connections.iter().map(|one| PollFd::new(&one.stream, one.awaits())));
        let timeout =
            connections.first().map(|oldest| timespec(PATIENCE.saturating_sub(oldest.since.elapsed())));
        // An error here can only be a lack of memory; the poll is repeated.
        let _ = poll(&mut fds, timeout.as_ref());
        let [is_over, is_asked] = [0, 1].map(|index| !fds[index].revents().is_empty());
        drop(fds);
        if is_over {
            return;
        }
        connections.retain_mut(|one| one.since.elapsed() < PATIENCE && one.advance(answer));
        if is_asked {
            let_in(listener, &mut connections);
        }
    }
}

/// Accepts connections, at most as many as there may be at a time.
fn let_in(listener: &TcpListener, connections: &mut Vec<Connection>) {
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
            // The listener stays readable, and would keep this thread busy.
            Err(_) => return std::thread::sleep(PAUSE),
        }
    }
}

struct Connection {
    stream: TcpStream,
    since: Instant,
    /// The bytes received so far.
    request: Vec<u8>,
    /// The answer, and how many bytes of it are sent.
    answer: Option<(Vec<u8>, usize)>,
}

impl Connection {
    fn awaits(&self) -> PollFlags {
        if self.answer.is_some() { PollFlags::OUT } else { PollFlags::IN }
    }

    /// Reads and writes as far as possible. False when the connection is over.
    fn advance(&mut self, answer: &dyn Fn(&str) -> Answer) -> bool {
        if self.answer.is_none() {
            match self.receive() {
                Ok(true) => self.answer = Some((answered(&self.request, answer), 0)),
                Ok(false) => return true,
                Err(_) => return false,
            }
        }
        let Some((bytes, sent)) = &mut self.answer else { return true };
        while *sent < bytes.len() {
            match self.stream.write(&bytes[*sent..]) {
                Ok(0) => return false,
                Ok(count) => *sent += count,
                Err(error) => return is_patient(&error),
            }
        }
        false
    }

    /// Whether the whole request has arrived.
    fn receive(&mut self) -> io::Result<bool> {
        let mut chunk = [0; 1024];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.request.extend_from_slice(&chunk[..count]),
                Err(error) if is_patient(&error) => return Ok(false),
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

fn is_patient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The whole answer to a request.
fn answered(request: &[u8], answer: &dyn Fn(&str) -> Answer) -> Vec<u8> {
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

    fn ask(server: &HttpServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.addr()).expect("a connection");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    }

    #[test]
    fn a_get_is_answered_whole() {
        let server = server();
        let text = ask(&server, "GET /a HTTP/1.1\r\nHost: b\r\n\r\n");
        assert!(
            text.starts_with("HTTP/1.1 404 Not Found\r\n") && text.ends_with("\r\n\r\nno /a\n"),
            "{text}"
        );
        assert!(ask(&server, "GET /long HTTP/1.0\r\n\r\n").ends_with("xxxx"));
        assert!(ask(&server, "POST /a HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn who_says_nothing_makes_way() {
        let server = server();
        let silent: Vec<TcpStream> =
            (0..200).map(|_| TcpStream::connect(server.addr()).expect("a connection")).collect();
        assert!(ask(&server, "GET /a HTTP/1.1\r\n\r\n").ends_with("no /a\n"));
        // A client that drains nothing of its answer.
        let deaf = TcpStream::connect(server.addr()).expect("a connection");
        (&deaf).write_all(b"GET /long HTTP/1.1\r\n\r\n").expect("sent");
        assert!(ask(&server, "GET /a HTTP/1.1\r\n\r\n").ends_with("no /a\n"));
        drop(silent);
    }

    #[test]
    fn endless_requests_end() {
        let server = server();
        let mut stream = TcpStream::connect(server.addr()).expect("a connection");
        let sent = (0..10_000).all(|_| stream.write_all(&[b'x'; 1024]).is_ok());
        assert!(!sent, "10 MB were taken for a request");
    }
}
