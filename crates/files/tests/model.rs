//! A region beside a plain file: random accesses, appends and changes of the layout, remote and local, with few windows.
//! `TERRACE_SEED` replays one run.

mod common;

use std::os::unix::fs::FileExt;

use common::{DIRECTORIES, TestFile, append, atomic, read, read_locally, region, write};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::fs::{Advice, fadvise};
use terrace_files::{FileRegion, Files, FilesConfig, WINDOW_BYTES};
use terrace_hostmem::AtomicOp;
use terrace_memory::{AccessError, LocalCopies};

/// Where accesses go: around the borders of windows, and anywhere near the start.
const BASES: [u64; 3] = [0, WINDOW_BYTES - 20_000, 3 * WINDOW_BYTES - 9000];
const STEPS: u32 = 3000;

/// What the file should hold: pages that differ from zeros.
struct Model {
    plain: std::fs::File,
    len: u64,
}

impl Model {
    fn content(&self, offset: u64, len: usize) -> Result<Vec<u8>, AccessError> {
        if offset + len as u64 > self.len {
            return Err(AccessError::OutOfRange);
        }
        let mut out = vec![0; len];
        self.plain.read_exact_at(&mut out, offset).expect("within the file");
        Ok(out)
    }

    fn set(&self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.content(offset, data.len())?;
        self.plain.write_all_at(data, offset).expect("space");
        Ok(())
    }

    fn set_len(&mut self, len: u64) {
        self.plain.set_len(len).expect("space");
        self.len = len;
    }
}

fn step(rng: &mut StdRng, model: &mut Model, region: &FileRegion, file: &std::fs::File) {
    let offset = BASES[rng.random_range(0..BASES.len())] + rng.random_range(0..30_000);
    let len = if rng.random_bool(0.1) { rng.random_range(1..20_000) } else { rng.random_range(1..300) };
    let mut data = vec![0; len];
    rng.fill_bytes(&mut data);
    match rng.random_range(0..100) {
        0..30 => assert_eq!(read(region, offset, len), model.content(offset, len)),
        30..40 => assert_eq!(read_locally(region, offset, len), model.content(offset, len)),
        40..60 => assert_eq!(write(region, offset, &data), model.set(offset, &data)),
        60..65 => assert_eq!(region.write_now(offset, &data), model.set(offset, &data)),
        65..78 => {
            let (offset, add) = (offset & !7, rng.random());
            let expected =
                model.content(offset, 8).map(|bytes| u64::from_ne_bytes(bytes[..].try_into().unwrap()));
            assert_eq!(atomic(region, offset, AtomicOp::FetchAdd { add }), expected);
            let _ = expected.map(|value| model.set(offset, &value.wrapping_add(add).to_ne_bytes()));
        }
        78..84 => {
            assert_eq!(append(region, &data, rng.random_bool(0.1)), Ok(model.len));
            let start = model.len;
            model.set_len(start + data.len() as u64);
            model.set(start, &data).expect("within");
        }
        84..90 => {
            region.truncate(offset).expect("truncated");
            model.set_len(offset);
        }
        90..94 => {
            let len = (len as u64).min(model.len.saturating_sub(offset));
            if len > 0 {
                region.punch_hole(offset, len).expect("punched");
                model.set(offset, &vec![0; len as usize]).expect("within");
            }
        }
        94..97 => {
            // By other means than the region. A shorter file is noticed a little later.
            let len = model.len + rng.random_range(0..50_000);
            file.set_len(len).expect("space");
            model.set_len(len);
        }
        _ => {
            // Pages leave the page cache, as far as nobody has them mapped or they are dirty.
            let _ = file.sync_data();
            let _ = fadvise(file, 0, None, Advice::DontNeed);
        }
    }
}

fn run(seed: u64, directory: &str, windows_max: usize) {
    let (file, plain) = (TestFile::new(directory, 40_000), TestFile::new("/dev/shm", 40_000));
    let files = Files::new(&FilesConfig { windows_max, descriptors_max: 1, workers_max: 3 });
    let region = region(&files, &file.file);
    let mut model = Model { plain: plain.file.try_clone().expect("a descriptor"), len: 40_000 };
    let mut rng = StdRng::seed_from_u64(seed);
    for count in 0..STEPS {
        step(&mut rng, &mut model, &region, &file.file);
        assert!(files.window_count() <= windows_max, "too many windows after {count} steps");
    }
    let len = std::fs::metadata(file.path()).expect("there").len();
    assert_eq!((len, region.file_len()), (model.len, model.len));
    for base in BASES.into_iter().filter(|&base| base <= model.len) {
        let len = (model.len - base).min(50_000) as usize;
        let mut out = vec![0; len];
        file.file.read_exact_at(&mut out, base).expect("within");
        assert!(model.content(base, len).as_ref() == Ok(&out), "the file differs near {base}");
    }
}

#[test]
fn a_region_behaves_as_the_file_does() {
    let given = std::env::var("TERRACE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = given.unwrap_or_else(rand::random);
    println!("TERRACE_SEED={seed}");
    for directory in DIRECTORIES {
        for windows_max in [0, 1, 100] {
            run(seed, directory, windows_max);
        }
    }
}
