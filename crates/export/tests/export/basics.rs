//! A client and a server in one process, by both transports.

use crate::support::{READ_WRITE, connect, serve};
use terrace_export::Completed;
use terrace_nic::PathChoice;

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

#[test]
fn pipelines_have_many_accesses_in_flight() {
    let directory = tempfile::tempdir().unwrap();
    let data = pattern(1 << 20);
    std::fs::write(directory.path().join("data"), &data).unwrap();
    let server = serve(directory.path(), PathChoice::Udp, "root = true");
    let client = connect(server.address(), PathChoice::Udp);
    let found = client.lookup_path("data".as_ref()).unwrap();
    let file = client.open(found.id, READ_WRITE).unwrap();
    let mut pipeline = client.pipeline(16, 4096).unwrap();
    let mut done = Vec::new();
    let mut next = 0;
    while done.len() < 256 {
        while next < 256 && pipeline.read(&file, next * 4096, 4096, next).is_ok() {
            next += 1;
        }
        pipeline.wait(&mut done, std::time::Duration::from_secs(5));
    }
    for completion in done {
        let at = completion.tag as usize * 4096;
        assert_eq!(completion.result.unwrap(), Completed::Read(data[at..at + 4096].to_vec()));
    }
}
