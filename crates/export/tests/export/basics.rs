//! A client and a server in one process, by both transports.

use std::time::Duration;

use rustix::io::Errno;
use terrace_export::{
    Change, ChangeSet, Completed, ExportError, FileKind, OpenAccess, Pipeline, RenameMode, Server,
    SetAttributes, SetTime, Timestamp,
};
use terrace_nic::PathChoice;

use crate::support::{READ_WRITE, connect, errno, serve, server_config, wait_until};

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn files_are_made_written_and_read(path: PathChoice) {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), path, "root = true");
    let client = connect(server.address(), path);
    let root = client.root();
    let sub = client.make_directory(root, "sub".as_ref(), 0o755).unwrap();
    let file = client.create(sub.id, "data".as_ref(), 0o644, READ_WRITE, true).unwrap();
    let data = pattern(3 << 20);
    file.write_at(5, &data).unwrap();
    assert_eq!(file.append(b"record").unwrap(), 5 + data.len() as u64);
    file.append_commit(&data[..400_000]).unwrap();
    file.commit().unwrap();
    let mut read = vec![1; data.len() + 5 + 6];
    assert_eq!(file.read_at(0, &mut read).unwrap(), read.len());
    assert_eq!(read[..5], [0; 5]);
    assert_eq!(read[5..5 + data.len()], data);
    assert_eq!(&read[5 + data.len()..], b"record");
    assert_eq!(file.len(), read.len() as u64 + 400_000);
    assert_eq!(file.read_at(file.len() - 1, &mut read).unwrap(), 1);
    assert_eq!(file.read_at(file.len() + 1, &mut read).unwrap(), 0);
    let local = std::fs::read(directory.path().join("sub/data")).unwrap();
    assert_eq!(local.len() as u64, file.len());
    assert_eq!(local[5..5 + data.len()], data);
    // What another one cuts off is not there any more.
    let other = std::fs::File::options().write(true).open(directory.path().join("sub/data")).unwrap();
    other.set_len(1000).unwrap();
    assert_eq!(file.read_at(0, &mut read).unwrap(), 1000);
    file.write_at(2000, b"x").unwrap();
    assert_eq!(file.attributes().unwrap().len, 2001);
    let names: Vec<_> = client.read_directory(sub.id, 0, true).unwrap().entries;
    assert_eq!(names.len(), 1);
    assert_eq!(names[0].name.0, b"data");
    assert_eq!(names[0].attributes.unwrap().id, file.id());
    file.close().unwrap();
    assert_eq!(server.stats().open_files, 0);
}

#[test]
fn files_are_made_written_and_read_by_packets() {
    files_are_made_written_and_read(PathChoice::Udp);
}

#[test]
fn files_are_made_written_and_read_within_the_host() {
    files_are_made_written_and_read(PathChoice::Local);
}

fn pipelines_have_many_accesses_in_flight(path: PathChoice) {
    let directory = tempfile::tempdir().unwrap();
    let data = pattern(1 << 20);
    std::fs::write(directory.path().join("data"), &data).unwrap();
    let server = serve(directory.path(), path, "root = true");
    let client = connect(server.address(), path);
    let found = client.lookup_path("data".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    let mut pipeline = client.pipeline(16, 4096).unwrap();
    let mut done = Vec::new();
    let mut next = 0;
    while done.len() < 256 {
        while next < 256 && pipeline.read(&file, next * 4096, 4096, next).is_ok() {
            next += 1;
        }
        assert!((1..=16).contains(&pipeline.in_flight()));
        pipeline.wait(&mut done, std::time::Duration::from_secs(5));
    }
    assert_eq!(pipeline.in_flight(), 0);
    for completion in done {
        let at = completion.tag as usize * 4096;
        assert_eq!(completion.result.unwrap(), Completed::Read(data[at..at + 4096].to_vec()));
    }
}

#[test]
fn pipelines_have_many_accesses_in_flight_by_udp() {
    pipelines_have_many_accesses_in_flight(PathChoice::Udp);
}

#[test]
fn pipelines_have_many_accesses_in_flight_within_the_host() {
    pipelines_have_many_accesses_in_flight(PathChoice::Local);
}

#[test]
fn attributes_are_set_and_persistent() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = connect(server.address(), PathChoice::Udp);
    let root = client.root();
    let file = client.create(root, "file".as_ref(), 0o600, READ_WRITE, true).unwrap();
    let time = Timestamp { seconds: 1_234_567_890, nanoseconds: 123_456_789 };
    let set = SetAttributes {
        mode: Some(0o640),
        len: Some(77),
        accessed: Some(SetTime::At(time)),
        modified: Some(SetTime::At(time)),
        ..SetAttributes::default()
    };
    let attributes = client.set_attributes(file.id(), &set).unwrap();
    assert_eq!((attributes.mode, attributes.len, attributes.kind), (0o640, 77, FileKind::Regular));
    assert_eq!((attributes.accessed, attributes.modified), (time, time));
    let now = SetAttributes { modified: Some(SetTime::Now), ..SetAttributes::default() };
    let touched = client.set_attributes(file.id(), &now).unwrap();
    assert!(touched.modified > time && touched.accessed == time);
    assert!(touched.version > 0);
    let invalid = SetTime::At(Timestamp { seconds: 0, nanoseconds: 1_000_000_000 });
    let invalid = SetAttributes { accessed: Some(invalid), ..SetAttributes::default() };
    assert_eq!(errno(client.set_attributes(file.id(), &invalid)), Errno::INVAL.raw_os_error());
    file.punch(0, 10).unwrap();
    file.grow(50).unwrap();
    assert_eq!(file.len(), 77);
    file.grow(100).unwrap();
    assert_eq!(file.len(), 100);
    client.sync(file.id()).unwrap();
    client.sync(root).unwrap();
    client.check_access(file.id(), 6).unwrap();
    assert!(client.file_system(root).unwrap().blocks > 0);
    assert_eq!(client.make_fifo(root, "fifo".as_ref(), 0o600).unwrap().kind, FileKind::Fifo);
    let fifo = client.lookup(root, "fifo".as_ref()).unwrap();
    assert_eq!(errno(client.open(fifo.id, OpenAccess::READ)), Errno::OPNOTSUPP.raw_os_error());
    assert_eq!(errno(client.open(root, OpenAccess::READ)), Errno::ISDIR.raw_os_error());
    let link = client.symlink(root, "link".as_ref(), "to".as_ref()).unwrap();
    assert_eq!(client.set_attributes(link.id, &now).unwrap().kind, FileKind::SymbolicLink);
    assert_eq!(client.link(file.id(), root, "second".as_ref()).unwrap().links, 2);
    let emptied = client.open(file.id(), READ_WRITE | OpenAccess::TRUNCATE).unwrap();
    assert_eq!((emptied.len(), file.attributes().unwrap().len), (0, 0));
}

#[test]
fn pipelines_survive_a_restart_and_a_file_that_changes() {
    for path in [PathChoice::Udp, PathChoice::Local] {
        let directory = tempfile::tempdir().unwrap();
        let mut config = server_config(directory.path(), path);
        let server = Server::open(&config).unwrap();
        config.listen = server.address();
        let client = connect(server.address(), path);
        let file = client.create(client.root(), "file".as_ref(), 0o600, READ_WRITE, true).unwrap();
        file.grow(64 * 1000).unwrap();
        let mut pipeline = client.pipeline(64, 1000).unwrap();
        let wait = |pipeline: &mut Pipeline| {
            let mut done = Vec::new();
            while pipeline.in_flight() > 0 {
                pipeline.wait(&mut done, Duration::from_secs(5));
            }
            done.sort_by_key(|completion| completion.tag);
            done.into_iter().map(|completion| completion.result.unwrap()).collect::<Vec<_>>()
        };
        for tag in 0..64 {
            pipeline.write(&file, tag * 1000, &[tag as u8; 1000], tag).unwrap();
        }
        assert!(matches!(pipeline.write(&file, 0, b"x", 64), Err(ExportError::Full)));
        assert_eq!(wait(&mut pipeline), vec![Completed::Written; 64]);
        // Writes behind a new end are repeated.
        file.truncate(10).unwrap();
        let other = client.open(file.id(), READ_WRITE).unwrap();
        for tag in 0..8 {
            pipeline.write(&other, tag * 1000, &[9; 1000], tag).unwrap();
        }
        assert_eq!(wait(&mut pipeline), vec![Completed::Written; 8]);
        drop(server);
        let _server = Server::open(&config).unwrap();
        client.attributes(client.root()).unwrap();
        for tag in 0..8 {
            pipeline.append(&file, &[tag as u8; 100], tag % 2 == 0, tag).unwrap();
        }
        let mut offsets: Vec<_> = wait(&mut pipeline);
        offsets.sort_by_key(|done| if let Completed::Appended(offset) = done { *offset } else { 0 });
        assert_eq!(offsets, (0..8).map(|at| Completed::Appended(8000 + at * 100)).collect::<Vec<_>>());
        pipeline.read(&file, 8700, 1000, 1).unwrap();
        assert_eq!(wait(&mut pipeline), [Completed::Read(vec![7; 100])]);
        assert_eq!(std::fs::metadata(directory.path().join("file")).unwrap().len(), 8800);
    }
}

#[test]
fn changes_of_local_programs_and_of_clients_are_announced() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let (one, two) = (connect(server.address(), PathChoice::Udp), connect(server.address(), PathChoice::Udp));
    one.watch(one.root()).unwrap();
    let expect = |wanted: ChangeSet| {
        wait_until("a change is announced", || {
            let change = one.next_change(Duration::from_secs(1));
            matches!(change, Some(Change::Changed { id, change }) if id == one.root() && change.contains(wanted))
        });
    };
    std::fs::write(directory.path().join("local"), "").unwrap();
    expect(ChangeSet::ENTRIES);
    two.make_directory(two.root(), "sub".as_ref(), 0o755).unwrap();
    expect(ChangeSet::ENTRIES);
    let chmod = SetAttributes { mode: Some(0o755), ..SetAttributes::default() };
    two.set_attributes(two.root(), &chmod).unwrap();
    expect(ChangeSet::ATTRIBUTES);
    while one.next_change(Duration::from_millis(100)).is_some() {}
    one.unwatch(one.root()).unwrap();
    std::fs::write(directory.path().join("more"), "").unwrap();
    assert_eq!(one.next_change(Duration::from_millis(200)), None);
}

#[test]
fn a_repeated_removal_is_of_the_file_that_had_the_name() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Local, "root = true");
    let client = connect(server.address(), PathChoice::Local);
    let root = client.root();
    let make = || client.create(root, "a".as_ref(), 0o644, READ_WRITE, true).unwrap().id();
    let first = make();
    assert_eq!(client.known_file(root, "a".as_ref()), Some(first));
    client.unlink(root, "a".as_ref()).unwrap();
    assert_eq!(errno(client.repeat_unlink(root, "a".as_ref(), first)), Errno::NOENT.raw_os_error());
    let second = make();
    let stale = Errno::STALE.raw_os_error();
    assert_eq!(errno(client.repeat_unlink(root, "a".as_ref(), first)), stale);
    let (from, to) = ((root, "a".as_ref()), (root, "b".as_ref()));
    assert_eq!(errno(client.repeat_rename(from, to, RenameMode::Replace, first)), stale);
    assert!(directory.path().join("a").exists());
    client.repeat_rename(from, to, RenameMode::Replace, second).unwrap();
    client.repeat_unlink(root, "b".as_ref(), second).unwrap();
    let made = client.make_directory(root, "d".as_ref(), 0o755).unwrap().id;
    assert_eq!(errno(client.repeat_remove_directory(root, "d".as_ref(), second)), stale);
    client.repeat_remove_directory(root, "d".as_ref(), made).unwrap();
}

#[test]
fn a_short_write_beyond_the_end_and_an_append_do_not_overwrite_one_another() {
    const ROUNDS: usize = 200;
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Local, "root = true");
    let connect = || connect(server.address(), PathChoice::Local);
    let (one, two) = (connect(), connect());
    let file = one.create(one.root(), "file".as_ref(), 0o644, READ_WRITE, true).unwrap();
    let found = two.lookup(two.root(), "file".as_ref()).unwrap();
    let records = two.open(found.id, OpenAccess::APPEND).unwrap();
    let appending = std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            records.append(&[1; 256 << 10]).unwrap();
        }
    });
    let mut offsets = Vec::new();
    while !appending.is_finished() {
        let offset = file.attributes().unwrap().len;
        file.write_short(offset, &[2; 64]).unwrap();
        offsets.push(offset as usize);
    }
    appending.join().unwrap();
    let bytes = std::fs::read(directory.path().join("file")).unwrap();
    for offset in offsets {
        assert_eq!(bytes[offset..offset + 64], [2; 64], "at {offset}");
    }
}

#[test]
fn bytes_that_a_message_carries_are_written_within_a_file_and_beyond_its_end() {
    for path in [PathChoice::Udp, PathChoice::Local] {
        let directory = tempfile::tempdir().unwrap();
        let server = serve(directory.path(), path, "root = true");
        let client = connect(server.address(), path);
        let file = client.create(client.root(), "file".as_ref(), 0o644, READ_WRITE, true).unwrap();
        file.write_at(0, b"0123456789").unwrap();
        file.write_by_message(2, b"ab").unwrap();
        file.write_by_message(12, b"cd").unwrap();
        assert_eq!(std::fs::read(directory.path().join("file")).unwrap(), b"01ab456789\0\0cd");
        assert_eq!(file.len(), 14);
        for (offset, len) in [(0, 8193), (u64::MAX, 1)] {
            assert_eq!(errno(file.write_by_message(offset, &vec![0; len])), Errno::INVAL.raw_os_error());
        }
        let reader = client.open(file.id(), OpenAccess::READ).unwrap();
        assert_eq!(errno(reader.write_by_message(0, b"x")), Errno::BADF.raw_os_error());
    }
}

#[test]
fn a_short_file_comes_with_the_answer_to_opening_it() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(directory.path(), PathChoice::Local, "root = true");
    let client = connect(server.address(), PathChoice::Local);
    let path = directory.path().join("file");
    let open = |access| {
        let id = client.lookup(client.root(), "file".as_ref()).unwrap().id;
        client.open_and_read(id, access).unwrap()
    };
    for len in [0, 1, 8192] {
        std::fs::write(&path, vec![7; len]).unwrap();
        let (file, bytes) = open(READ_WRITE);
        assert_eq!(bytes, Some(vec![7; len]));
        assert_eq!(file.opened_attributes().len, len as u64);
    }
    assert_eq!(open(OpenAccess::WRITE).1, None, "it is not open for reading");
    std::fs::write(&path, vec![7; 8193]).unwrap();
    assert_eq!(open(OpenAccess::READ).1, None, "it is longer");
    assert_eq!(open(READ_WRITE | OpenAccess::TRUNCATE).1, None);
    assert!(std::fs::read(&path).unwrap().is_empty());
}

#[test]
fn extents_are_written_together_and_make_the_file_longer() {
    for path in [PathChoice::Local, PathChoice::Udp] {
        let directory = tempfile::tempdir().unwrap();
        let server = serve(directory.path(), path, "root = true");
        let client = connect(server.address(), path);
        let file = client.create(client.root(), "file".as_ref(), 0o644, READ_WRITE, true).unwrap();
        let blocks: Vec<Vec<u8>> = (0..40).map(|number| vec![number; 1000 + usize::from(number)]).collect();
        let extents: Vec<(u64, &[u8])> = blocks
            .iter()
            .enumerate()
            .rev()
            .map(|(number, block)| (number as u64 * 3000, &block[..]))
            .collect();
        file.write_extents(&extents).unwrap();
        file.write_extents(&[(1, &[]), (u64::MAX, &[])]).unwrap();
        assert!(file.write_extents(&[(u64::MAX, &[1])]).is_err());
        let mut expected = vec![0; 39 * 3000 + 1039];
        for (offset, block) in &extents {
            expected[*offset as usize..*offset as usize + block.len()].copy_from_slice(block);
        }
        assert_eq!(std::fs::read(directory.path().join("file")).unwrap(), expected);
    }
}
