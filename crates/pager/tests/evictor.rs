//! The thread that moves pages of a program away, asked by a pager that errs.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use common::{compile, full_pipe, preload};
use rustix::process::Signal;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::userfault::{Message, Userfaultfd};
use terrace_vm::{EvictionArea, Task, handshake};

const ENOENT: i32 = 2;

/// Puts zeros where the program touches new memory, until a condition holds.
fn serve_until(userfaultfd: &Userfaultfd, is_met: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_met() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the program is stuck");
        match userfaultfd.read().unwrap() {
            Some(Message::Fault { page, .. }) => {
                userfaultfd.zero(HostRange { addr: page, len: PAGE_BYTES }).unwrap();
            }
            Some(_) => {}
            None => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

#[test]
fn pages_of_memory_that_is_not_registered_do_not_leave() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = preload(compile("unregistered"), &path);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    let (_, descriptors) = handshake::receive_hello(&socket).unwrap();
    let mut descriptors = descriptors.into_iter();
    let area = EvictionArea::open(descriptors.next().unwrap()).unwrap();
    let userfaultfd: Userfaultfd = descriptors.next().unwrap().into();
    handshake::send_welcome(&socket, userfaultfd.as_fd()).unwrap();

    let mut output = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        (output, line)
    });
    serve_until(&userfaultfd, || area.is_ready() && reader.is_finished());
    let (mut output, line) = reader.join().unwrap();
    let addr = u64::from_str_radix(line.trim().trim_start_matches("0x"), 16).unwrap();
    let pages: Vec<_> = (0..4).map(|index| (addr + index * PAGE_BYTES, true)).collect();
    area.publish(Task::Evict, &pages);
    socket.write_all(b"r").unwrap();
    serve_until(&userfaultfd, || area.is_idle());
    let errors: Vec<_> = (0..pages.len()).map(|index| area.error(index)).collect();

    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!((errors.as_slice(), line.trim()), (&[ENOENT; 4][..], "verified"));
    assert!(child.wait().unwrap().success());
}

/// Puts zeros where a program touches new memory, and a number in its identity page. Returns the descriptor of a child, if it has a
/// new one.
fn serve(userfaultfd: &Userfaultfd, identity_page: u64) -> Option<Userfaultfd> {
    match userfaultfd.read().unwrap()? {
        Message::Fault { page, .. } => {
            let byte = u8::from(page == identity_page);
            // An error means that the process has ended.
            let _ = userfaultfd.copy(&[byte; PAGE_BYTES as usize], page, false);
            None
        }
        Message::Fork(child) => Some(child),
        _ => None,
    }
}

#[test]
fn a_child_waits_for_its_pager_as_its_faults_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = preload(compile("child"), &path);
    let mut program = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (socket, _) = listener.accept().unwrap();
    let (hello, descriptors) = handshake::receive_hello(&socket).unwrap();
    let userfaultfd: Userfaultfd = descriptors.into_iter().nth(1).unwrap().into();
    handshake::send_welcome(&socket, userfaultfd.as_fd()).unwrap();

    listener.set_nonblocking(true).unwrap();
    let (mut child, mut joining, mut is_answered) = (None, None, false);
    let begin = Instant::now();
    while program.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(60) {
            program.kill().unwrap();
            panic!("the program is stuck: {:?}", program.wait_with_output());
        }
        std::thread::sleep(Duration::from_micros(100));
        child = serve(&userfaultfd, hello.identity_page).or(child);
        let Some(child) = &child else { continue };
        serve(child, hello.identity_page);
        match &joining {
            None => joining = listener.accept().ok().map(|(socket, _)| (socket, Instant::now())),
            // The pager was stopped for that long.
            Some((socket, since)) if since.elapsed() > Duration::from_secs(11) && !is_answered => {
                handshake::receive_hello(socket).unwrap();
                handshake::send_welcome(socket, child.as_fd()).unwrap();
                is_answered = true;
            }
            Some(_) => {}
        }
    }
    let output = program.wait_with_output().unwrap();
    assert_eq!(
        (output.stdout.as_slice(), output.stderr.as_slice()),
        (&b"verified\n"[..], &b""[..]),
        "{output:?}"
    );
}

/// Starts a program, and ends its pager when the program waits for a page.
fn end_pager_of_program(errors: Stdio) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = preload(compile("touch"), &path);
    let mut program = command.arg("1").stdout(Stdio::null()).stderr(errors).spawn().unwrap();
    let (socket, _) = listener.accept().unwrap();
    let (_, descriptors) = handshake::receive_hello(&socket).unwrap();
    let userfaultfd: Userfaultfd = descriptors.into_iter().nth(1).unwrap().into();
    handshake::send_welcome(&socket, userfaultfd.as_fd()).unwrap();
    let begin = Instant::now();
    while userfaultfd.read().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(20), "no fault");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((socket, userfaultfd));
    while program.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(60) {
            program.kill().unwrap();
            panic!("the program is stuck");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    program.wait_with_output().unwrap()
}

#[test]
fn a_program_whose_pager_has_ended_says_why_it_is_killed() {
    let output = end_pager_of_program(Stdio::piped());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(Signal::KILL.as_raw()), "{errors}");
    let rest = errors.strip_prefix("terrace: process ").expect(&errors);
    let rest = rest.trim_start_matches(|letter: char| letter.is_ascii_digit());
    assert_eq!(rest, " is killed: its pager has ended, and its memory with it\n");
}

#[test]
fn a_program_whose_standard_error_is_full_is_killed_with_its_pager() {
    let (_reader, writer) = full_pipe();
    let output = end_pager_of_program(writer.into());
    assert_eq!(output.status.signal(), Some(Signal::KILL.as_raw()));
}

#[test]
fn children_without_a_thread_end_with_their_pager() {
    let program = compile("crowded");
    for left in ["2", "1"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut command = preload(&program, &path);
        let mut program = command.args(["1", left, "40"]).stderr(Stdio::piped()).spawn().unwrap();
        let (socket, _) = listener.accept().unwrap();
        let (hello, descriptors) = handshake::receive_hello(&socket).unwrap();
        let userfaultfd: Userfaultfd = descriptors.into_iter().nth(1).unwrap().into();
        handshake::send_welcome(&socket, userfaultfd.as_fd()).unwrap();

        listener.set_nonblocking(true).unwrap();
        let (mut processes, mut links) = (vec![userfaultfd], vec![socket]);
        // They have said that their memory stays local when nothing has come from them for a while.
        let (begin, mut joined_at) = (Instant::now(), Instant::now());
        while links.len() < 3 || joined_at.elapsed() < Duration::from_millis(500) {
            assert!(begin.elapsed() < Duration::from_secs(20), "the program is stuck");
            std::thread::sleep(Duration::from_micros(100));
            let children = processes.iter().filter_map(|process| serve(process, hello.identity_page));
            let children: Vec<_> = children.collect();
            processes.extend(children);
            if let Ok((socket, _)) = listener.accept() {
                handshake::receive_hello(&socket).unwrap();
                handshake::send_welcome(&socket, processes[links.len()].as_fd()).unwrap();
                links.push(socket);
                joined_at = Instant::now();
            }
        }
        let ended_at = Instant::now();
        drop((processes, links));
        // The end of the last process that has it.
        let mut errors = String::new();
        program.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert!(ended_at.elapsed() < Duration::from_secs(20), "{left}: {errors}");
        let status = program.wait().unwrap();
        // Its child may be killed before, which it sees.
        let is_ended = status.signal() == Some(Signal::KILL.as_raw()) || status.code() == Some(1);
        assert!(is_ended, "{status}: {errors}");
        assert_eq!(errors.matches("stays local").count(), 2, "{errors}");
    }
}
