//! `terrace recover`: writes the pages back that a killed server has left in memory.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use terrace_bench::progress::ByteProgress;
use terrace_pages::{PagesError, RecoverProgress, Recovered};

use crate::json;
use crate::log::LogOption;
use crate::output::print;

const AFTER_HELP: &str = "\
Examples:
  terrace recover /data/table.bin                # the pages of one file
  terrace recover /dev/shm/terrace-pages-NAME    # of all files whose pages are in this pool
  terrace recover /data/*.bin --json

A server keeps pages of its regions' files in a pool, a file in memory (terrace-pages-NAME, in
/dev/shm or on hugetlbfs). When the server is killed, the pool stays, and has acknowledged writes
that the files lack. The next server of the same pool takes them over. Where no server shall run
again, this command writes them to the files and removes the pool. Afterwards the files have every
acknowledged write, on the device.

While a file may lack bytes, .FILE.terrace-pages beside it names the pool. After a restart of the
system the pool is gone: what was flushed is in the file, other acknowledged writes are lost, and
the command says so.

A page that cannot be written, such as when the disk is full, stays in the pool; the command can be
repeated, and goes on where it stopped. The exit status is 0 if every file has all of its bytes,
and 1 otherwise.";

/// Options of `terrace recover`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// Files of regions, or pools
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Directory of the pools, as for `terrace serve` [default: hugetlbfs, /dev/shm, and what lock files name]
    #[arg(long, value_name = "DIR")]
    frames: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogOption,
}

/// Some files were not recovered, or the outcome cannot be printed.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// The errors of the files that lack pages; all others were recovered.
    #[error("{}", one_by_one(.0))]
    Files(Vec<PagesError>),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
}

/// Each error on a line as the command prints errors.
fn one_by_one(errors: &[PagesError]) -> String {
    errors.iter().map(PagesError::to_string).collect::<Vec<_>>().join("\nterrace: ")
}

/// The outcome for one file.
#[derive(Serialize)]
struct FileView {
    path: String,
    pages_written: u64,
    pools: Vec<PoolView>,
    /// The file, its name or its permissions had changed.
    is_changed: bool,
}

#[derive(Serialize)]
struct PoolView {
    path: String,
    is_removed: bool,
}

/// Recovers each path, and prints what was done.
pub fn recover(options: &Options) -> Result<(), RecoverError> {
    options.log.install();
    let (mut views, mut errors) = (Vec::new(), Vec::new());
    // A full standard output keeps no file from being recovered.
    let mut printed = Ok(true);
    let mut report = |text: &str| {
        if printed.is_ok() {
            printed = print(text);
        }
    };
    for path in &options.paths {
        let outcomes = recover_path(path, options.frames.as_deref());
        if outcomes.is_empty() && !options.json {
            report(&format!("{}: nothing to recover: the pool has no pages\n", path.display()));
        }
        for outcome in outcomes {
            match outcome {
                Ok(recovered) => {
                    if !options.json {
                        report(&text(&recovered));
                    }
                    views.push(view(recovered));
                }
                Err(error) => errors.push(error),
            }
        }
    }
    if options.json {
        report(&json::list("files", &views));
    }
    if !errors.is_empty() {
        return Err(RecoverError::Files(errors));
    }
    printed?;
    Ok(())
}

/// An outcome for each file: of a file one, of a pool as many as it has regions.
fn recover_path(path: &Path, frames: Option<&Path>) -> Vec<Result<Recovered, PagesError>> {
    let mut line: Option<(PathBuf, ByteProgress)> = None;
    let mut show = |progress: RecoverProgress<'_>| {
        if line.as_ref().is_none_or(|(path, _)| path != progress.path) {
            let name = progress.path.display().to_string();
            line = Some((progress.path.to_owned(), ByteProgress::new(&name, progress.bytes)));
        }
        if let Some((_, line)) = &line {
            line.set_bytes(progress.bytes_written);
        }
    };
    let outcomes = if terrace_pages::is_pool(path) {
        terrace_pages::recover_pool(path, &mut show).unwrap_or_else(|error| vec![Err(error)])
    } else {
        vec![terrace_pages::recover(path, frames, &mut show)]
    };
    if let Some((_, line)) = line {
        line.end();
    }
    outcomes
}

/// A path in a document, which is text.
fn lossy(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn view(recovered: Recovered) -> FileView {
    let pool = |path: PathBuf| PoolView { is_removed: !path.exists(), path: lossy(&path) };
    FileView {
        path: lossy(&recovered.path),
        pages_written: recovered.pages_written,
        pools: recovered.pools.into_iter().map(pool).collect(),
        is_changed: recovered.is_changed,
    }
}

/// A line that says what was done, and lines of what to know about it.
fn text(recovered: &Recovered) -> String {
    let path = recovered.path.display();
    let fate = |pool: &PathBuf| {
        let fate = if pool.exists() { "stays, with pages of other files" } else { "removed" };
        format!("{} ({fate})", pool.display())
    };
    let pools = recovered.pools.iter().map(fate).collect::<Vec<_>>().join(", ");
    let mut text = match recovered.pages_written {
        0 if pools.is_empty() => format!("{path}: nothing to recover: no pool has pages of it\n"),
        0 => format!("{path}: nothing to recover: the file has all bytes that were in {pools}\n"),
        pages => format!("{path}: {pages} pages of 4 KiB are written back from {pools}\n"),
    };
    if recovered.is_changed {
        text += &format!(
            "{path}: the file, its name or its permissions have changed since its server was killed; where another program \
             wrote to these pages, its bytes are replaced\n"
        );
    }
    if recovered.pools.is_empty() {
        for error in &recovered.unexamined {
            text += &format!("{path}: a pool was not examined: {error}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_what_was_done_with_file_and_pool() {
        let nothing = Recovered { path: "/data/a".into(), ..Recovered::default() };
        assert_eq!(text(&nothing), "/data/a: nothing to recover: no pool has pages of it\n");
        let with = |pages_written, is_changed| {
            let pools = vec!["/nowhere/pool".into(), "/dev".into()];
            text(&Recovered {
                path: "/data/a".into(),
                pools,
                pages_written,
                is_changed,
                unexamined: Vec::new(),
            })
        };
        assert_eq!(
            with(7, false),
            "/data/a: 7 pages of 4 KiB are written back from /nowhere/pool (removed), /dev (stays, with pages of other \
             files)\n"
        );
        assert!(with(0, false).contains("the file has all bytes that were in /nowhere/pool (removed)"));
        assert!(with(7, true).contains("another program"));
    }
}
