//! Writes the man pages and shell completions of the `terrace` command, for the packages: `manual FOLDER`.
//!
//! The folder gets the layout of an installation prefix: `share/man/man1/` and one folder for each shell.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

use clap_complete::Shell;

/// The path of each shell's completions of packages, below the prefix.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions/terrace"),
    (Shell::Zsh, "share/zsh/vendor-completions/_terrace"),
    (Shell::Fish, "share/fish/vendor_completions.d/terrace.fish"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let prefix = PathBuf::from(env::args_os().nth(1).ok_or("usage: manual FOLDER")?);
    write_man_pages(&prefix.join("share/man/man1"))?;
    for (shell, path) in COMPLETIONS {
        write_completions(shell, &prefix.join(path))?;
    }
    Ok(())
}

/// Writes a page for the command and one for each subcommand.
fn write_man_pages(folder: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(terrace_cli::definition(), folder)?;
    Ok(())
}

fn write_completions(shell: Shell, path: &Path) -> Result<(), Box<dyn Error>> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut terrace_cli::definition(), "terrace", &mut script);
    fs::create_dir_all(path.parent().ok_or("a path without a folder")?)?;
    fs::write(path, script)?;
    Ok(())
}
