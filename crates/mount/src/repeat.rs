//! Requests that may have been done before the connection was lost.
//!
//! The client does not repeat a request that changes names ([`ExportError::Unanswered`]), but for one that makes a regular file, which
//! the server knows again. The mount does, once. The error that a done request gives when it is repeated is success then. What removes a
//! name is repeated only for the file that had it: by then the name may be a new file's.

use fuser::Errno;
use terrace_export::{ExportError, FileId};

/// Makes a request that removes the name of a file, and repeats it if its answer was lost: with the file that is known to have
/// had the name. `is_done` says whether the first one had been done, for the error of the repeated one: `ENOENT` if the name
/// is gone, `ESTALE` if another file has it.
///
/// # Errors
/// Those of the request; `Unanswered` if nobody knows whether it was done.
pub(crate) fn removal(
    known: Option<FileId>,
    mut request: impl FnMut(Option<FileId>) -> Result<(), ExportError>,
    is_done: impl FnOnce(FileId, i32) -> bool,
) -> Result<(), ExportError> {
    match (request(None), known) {
        (Err(ExportError::Unanswered), Some(file)) => match request(Some(file)) {
            Err(ExportError::Os(errno)) if errno == Errno::ENOENT.code() || errno == Errno::ESTALE.code() => {
                match is_done(file, errno) {
                    true => Ok(()),
                    false if errno == Errno::ENOENT.code() => Err(ExportError::Os(errno)),
                    false => Err(ExportError::Unanswered),
                }
            }
            result => result,
        },
        (result, _) => result,
    }
}

/// Makes a request that makes a name, and repeats it if its answer was lost. `done` is the error that says that it had been
/// done: `EEXIST`. The result is `None` then.
///
/// # Errors
/// Those of the request.
pub(crate) fn once<T>(
    done: Errno,
    mut request: impl FnMut() -> Result<T, ExportError>,
) -> Result<Option<T>, ExportError> {
    match request() {
        Err(ExportError::Unanswered) => match request() {
            Err(ExportError::Os(errno)) if errno == done.code() => Ok(None),
            result => result.map(Some),
        },
        result => result.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The results of a request, in order, and the number of requests made.
    fn make(mut results: Vec<Result<u8, ExportError>>) -> (Result<Option<u8>, i32>, usize) {
        let count = results.len();
        let result = once(Errno::EEXIST, || results.remove(0)).map_err(|error| error.errno());
        (result, count - results.len())
    }

    /// The result of a removal whose first answer is lost, and the files that it named.
    fn remove(repeated: Result<(), i32>, is_done: bool) -> (Result<(), i32>, Vec<Option<FileId>>) {
        let mut named = Vec::new();
        let request = |only| {
            named.push(only);
            match only {
                None => Err(ExportError::Unanswered),
                Some(_) => repeated.map_err(ExportError::Os),
            }
        };
        let result = removal(Some(FileId::default()), request, |_, _| is_done);
        (result.map_err(|error| error.errno()), named)
    }

    #[test]
    fn a_name_is_removed_again_only_if_it_is_still_the_files() {
        let named = vec![None, Some(FileId::default())];
        let (gone, other) = (Errno::ENOENT.code(), Errno::ESTALE.code());
        assert_eq!(remove(Ok(()), false), (Ok(()), named.clone()));
        assert_eq!(remove(Err(gone), true), (Ok(()), named.clone()));
        assert_eq!(remove(Err(gone), false), (Err(gone), named.clone()));
        assert_eq!(remove(Err(other), false), (Err(Errno::EIO.code()), named.clone()));
        assert_eq!(remove(Err(Errno::EACCES.code()), true), (Err(Errno::EACCES.code()), named));
        let unknown = removal(None, |_| Err(ExportError::Unanswered), |_, _| true);
        assert!(matches!(unknown, Err(ExportError::Unanswered)));
    }

    #[test]
    fn only_a_repeated_request_takes_the_error_as_success() {
        let exists = || Err(ExportError::Os(Errno::EEXIST.code()));
        let lost = || Err(ExportError::Unanswered);
        assert_eq!(make(vec![Ok(7)]), (Ok(Some(7)), 1));
        assert_eq!(make(vec![exists()]), (Err(Errno::EEXIST.code()), 1));
        assert_eq!(make(vec![lost(), Ok(7)]), (Ok(Some(7)), 2));
        assert_eq!(make(vec![lost(), exists()]), (Ok(None), 2));
        assert_eq!(make(vec![lost(), lost(), Ok(7)]).1, 2);
    }
}
