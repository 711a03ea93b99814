//! The `terrace` command. Its code is in the library of this package.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    terrace_cli::run()
}
