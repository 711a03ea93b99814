//! Every `terrace` command line in README, in the pages of docs and in the help texts is one that the command accepts.

use std::path::{Path, PathBuf};

/// Values of the examples' placeholders.
const PLACEHOLDERS: [(&str, &str); 4] = [("PID", "4242"), ("N", "1"), ("SIZE", "64M"), ("A", "127.0.0.1")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The command lines in blocks of shell of a page.
fn shell_lines(page: &str) -> Vec<String> {
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or(""));
    blocks
        .flat_map(|block| block.replace("\\\n", " ").lines().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// The `terrace` commands of a line of shell, each as its words. Substitutions become a number.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut line = line.to_owned();
    while let Some(start) = line.find("$(") {
        let Some(length) = line[start..].find(')') else { break };
        line.replace_range(start..=start + length, "4242");
    }
    let (mut simple, mut words, mut word) = (Vec::new(), Vec::new(), String::new());
    let mut quote = None;
    for character in line.chars().chain([';']) {
        match (quote, character) {
            (Some(open), _) if open == character => quote = None,
            (None, '"' | '\'') => quote = Some(character),
            (None, '#') if word.is_empty() => break,
            (None, ' ' | '&' | '|' | ';') => {
                words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                if character != ' ' {
                    simple.push(std::mem::take(&mut words));
                }
            }
            _ => word.push(character),
        }
    }
    words.extend((!word.is_empty()).then_some(word));
    simple.push(words);
    let from_name = |words: Vec<String>| -> Option<Vec<String>> {
        let name = words.iter().position(|word| word == "terrace" || word.ends_with("/bin/terrace"))?;
        Some(words[name..].to_vec())
    };
    simple.into_iter().filter_map(from_name).collect()
}

/// The command line with values in place of placeholders, and an existing fault plan.
fn filled_in(words: &[String]) -> Vec<String> {
    let mut words = words.to_vec();
    for word in &mut words {
        if let Some((_, value)) = PLACEHOLDERS.iter().find(|(name, _)| name == word) {
            *word = (*value).to_owned();
        }
    }
    for index in 1..words.len() {
        if words[index - 1] == "--fault-plan" {
            words[index] = root().join("examples/faults.toml").to_str().unwrap().to_owned();
        }
    }
    words
}

/// Why the command does not accept a line.
fn refusal(words: &[String]) -> Option<String> {
    let error = terrace_cli::definition().try_get_matches_from(filled_in(words)).err()?;
    error.use_stderr().then(|| error.to_string())
}

#[test]
fn commands_of_the_pages_are_accepted() {
    let mut count = 0;
    for page in pages() {
        for line in shell_lines(&std::fs::read_to_string(&page).unwrap()) {
            for words in commands(&line) {
                assert_eq!(refusal(&words), None, "{}: {line}", page.display());
                count += 1;
            }
        }
    }
    assert!(count > 40, "{count} commands");
}

/// The pages, README among them.
fn pages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = entries.filter(|path| path.extension().is_some_and(|end| end == "md"));
    pages.chain([root().join("README.md")]).collect()
}

/// What a `terrace` command in a line of prose or a table names that does not exist: its command, or an option.
fn unknown_name(code: &str) -> Option<String> {
    let mut words = code.split([' ', '=', '[', ']']).filter(|word| !word.is_empty());
    let name = words.nth(1)?;
    let definition = terrace_cli::definition();
    if name == "COMMAND" || name.starts_with('-') {
        return None;
    }
    let Some(command) = definition.find_subcommand(name) else { return Some(name.to_owned()) };
    let options = words.take_while(|word| *word != "--").filter_map(|word| word.strip_prefix("--"));
    let is_known = |option: &str| {
        option == "help"
            || [command]
                .into_iter()
                .chain(command.get_subcommands())
                .any(|command| command.get_arguments().any(|argument| argument.get_long() == Some(option)))
    };
    options.filter(|option| !is_known(option)).map(str::to_owned).next()
}

#[test]
fn commands_in_prose_name_what_exists() {
    let mut count = 0;
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for code in text.split('`').filter(|code| code.starts_with("terrace ") && !code.contains('\n')) {
            assert_eq!(unknown_name(code), None, "{}: {code}", page.display());
            count += 1;
        }
    }
    assert!(count > 60, "{count} commands");
    assert_eq!(unknown_name("terrace serve --none"), Some("none".to_owned()));
    assert_eq!(unknown_name("terrace nothing"), Some("nothing".to_owned()));
}

#[test]
fn commands_of_the_help_texts_are_accepted() {
    let definition = terrace_cli::definition();
    let helps =
        definition.get_subcommands().chain([&definition]).filter_map(clap::Command::get_after_long_help);
    let mut count = 0;
    for help in helps.map(ToString::to_string).collect::<Vec<_>>() {
        for line in help.lines().filter(|line| line.starts_with("  ")) {
            for words in commands(line) {
                assert_eq!(refusal(&words), None, "{line}");
                count += 1;
            }
        }
    }
    assert!(count > 20, "{count} commands");
}

#[test]
fn commands_are_found_in_lines_of_shell() {
    let found =
        commands("x | build/bin/terrace stat \"$(pidof a | cut -d' ' -f1)\" & terrace top # terrace no");
    assert_eq!(found, [vec!["build/bin/terrace", "stat", "4242"], vec!["terrace", "top"]]);
    assert!(refusal(&["terrace".into(), "stat".into(), "--none".into()]).is_some());
    assert_eq!(shell_lines("a\n```sh\nb \\\n c\n```\n```c\nd\n```\n"), ["b   c"]);
}
