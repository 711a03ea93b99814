//! Requests that may have been done before the connection was lost.
//!
//! The client does not repeat a request that changes names ([`ExportError::Unanswered`]). The mount does, once. The error that
//! a done request gives when it is repeated is success then, except where the request opens the file that it makes.

use fuser::Errno;
use terrace_export::ExportError;

/// Makes a request, and repeats it if its answer was lost. `done` is the error that says that it had been done: `EEXIST` for
/// what makes a name, `ENOENT` for what removes one. The result is `None` then.
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
