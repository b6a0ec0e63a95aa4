//! Holds the documents against the code: each command that they show parses, and each piece of a run file.

use std::path::{Path, PathBuf};

use clap::Parser as _;
use clap::error::ErrorKind;

use super::Cli;
use crate::config::RunConfig;

/// What surrounds a place in a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A line of a block, or of a comment of an example: a whole command.
    Line,
    /// A span within a sentence, which may leave arguments out.
    Span,
}

/// What a run needs besides the keys that are looked at.
const MODEL: &str = "model.path=starter";

/// A command that a document shows.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    kind: Kind,
    words: Vec<String>,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files below a folder that end so.
fn files_below(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(folder).expect("the folder is there");
    let paths = entries.map(|entry| entry.expect("it is listed").path());
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            found.extend(files_below(&path, extensions));
        } else if path.extension().is_some_and(|extension| {
            extensions
                .iter()
                .any(|wanted| extension.eq_ignore_ascii_case(wanted))
        }) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn documents() -> Vec<(PathBuf, String)> {
    let mut paths = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    paths.extend(files_below(&root().join("docs"), &["md"]));
    paths.extend(files_below(&root().join("examples"), &["md"]));
    let read = |path: PathBuf| {
        let text = fs_err::read_to_string(&path).expect("it is text");
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Returns the words of our command in a line of a shell, where it has one.
fn command_in(line: &str) -> Option<Vec<String>> {
    let line = line.trim().trim_start_matches("$ ");
    let end = [" | ", " > ", " && ", " #", " &", ";", " 2>"];
    let end = end.iter().filter_map(|mark| line.find(mark)).min();
    let line = &line[..end.unwrap_or(line.len())];
    // What is optional is there, and of alternatives the first.
    let line = line.replace(['[', ']'], "");
    let words = shell_words(&line);
    let is_setting = |word: &&String| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
        })
    };
    let words: Vec<String> = words.iter().skip_while(is_setting).cloned().collect();
    let first = words.first()?;
    let is_open = words.get(1).is_some_and(|word| is_placeholder(word));
    if is_open || words.iter().any(|word| word.contains('$')) {
        return None; // only the reader, or a shell, knows
    }
    if first == "wardian" || first.ends_with("/wardian") {
        return Some(words);
    }
    let arguments = words.iter().position(|word| word == "--")?;
    let is_run = words.starts_with(&["cargo".to_owned(), "run".to_owned()]);
    is_run.then(|| {
        let mut own = words[arguments..].to_vec();
        "wardian".clone_into(&mut own[0]);
        own
    })
}

/// Splits at blanks outside of quotes, and takes the quotes away.
fn shell_words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for character in line.chars() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

/// Returns the commands of a Markdown text.
fn commands(text: &str) -> Vec<Shown> {
    let joined = text.replace("\\\n", " ");
    let (mut found, mut fence) = (Vec::new(), None);
    let mut prose = String::new();
    for line in joined.lines() {
        if let Some(info) = line.trim_start().strip_prefix("```") {
            fence = match fence {
                Some(_) => None,
                None => Some(info.to_owned()),
            };
            continue;
        }
        let is_block = fence.is_some() || line.starts_with("    ");
        if is_block {
            let words = command_in(line);
            found.extend(words.map(|words| Shown {
                kind: Kind::Line,
                words,
            }));
        } else {
            prose.push_str(line);
            prose.push(' ');
        }
    }
    let spans = prose.split('`').skip(1).step_by(2);
    found.extend(spans.filter_map(|span| {
        let words = command_in(span)?;
        Some(Shown {
            kind: Kind::Span,
            words,
        })
    }));
    found
}

/// Whether a word stands for what the reader puts there.
fn is_placeholder(value: &str) -> bool {
    value.contains(['<', '…', '{'])
        || value.chars().any(char::is_alphabetic) && value.chars().all(|c| !c.is_lowercase())
}

/// Returns what is wrong with a command.
fn fault_of(shown: &Shown) -> Option<String> {
    // Of a list of flags and of what is left out, what is there.
    let words: Vec<&str> = shown
        .words
        .iter()
        .map(String::as_str)
        .filter(|word| *word != "…" && *word != "...")
        .collect();
    if let Err(error) = Cli::try_parse_from(&words) {
        let is_short = matches!(
            error.kind(),
            ErrorKind::MissingRequiredArgument
                | ErrorKind::MissingSubcommand
                | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                | ErrorKind::InvalidValue
        );
        let is_told = matches!(
            error.kind(),
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
        );
        let is_fine = is_told || is_short && shown.kind == Kind::Span;
        if !is_fine {
            return Some(error.to_string());
        }
    }
    let sets = words.windows(2).filter(|pair| pair[0] == "--set");
    for set in sets.map(|pair| pair[1]) {
        let is_open = set
            .split_once('=')
            .is_none_or(|(_, value)| is_placeholder(value));
        if is_open {
            continue;
        }
        if let Err(error) = RunConfig::from_toml("", &[set, MODEL]) {
            return Some(format!("{set}: {error}"));
        }
    }
    None
}

#[test]
fn commands_are_found_where_they_are_shown() {
    let text = "Say `wardian eval\n--samples 8` or `wardian`.\n```sh\nA=b wardian train --set 'a=b c' # so\n\
                $ cargo run --release -- chat\nls\nwardian eval \\\n  --samples 2 > file\n```\n    wardian exec a.py\n";
    let of = |kind, words: &[&str]| Shown {
        kind,
        words: words.iter().copied().map(str::to_owned).collect(),
    };
    let expected = [
        of(Kind::Line, &["wardian", "train", "--set", "a=b c"]),
        of(Kind::Line, &["wardian", "chat"]),
        of(Kind::Line, &["wardian", "eval", "--samples", "2"]),
        of(Kind::Line, &["wardian", "exec", "a.py"]),
        of(Kind::Span, &["wardian", "eval", "--samples", "8"]),
        of(Kind::Span, &["wardian"]),
    ];
    assert_eq!(commands(text), expected);
    let is_wrong =
        |line: &str| fault_of(&of(Kind::Line, &line.split(' ').collect::<Vec<_>>())).is_some();
    assert!(!is_wrong("wardian train --set trainer.steps=4"));
    for wrong in [
        "wardian train --set trainer.step=4",
        "wardian train --stps 4",
        "wardian exec",
        "wardian trian",
    ] {
        assert!(is_wrong(wrong), "{wrong}");
    }
}

#[test]
fn every_command_in_the_documents_parses() {
    let (mut count, mut faults) = (0, Vec::new());
    for (path, text) in documents() {
        for shown in commands(&text) {
            count += 1;
            if let Some(fault) = fault_of(&shown) {
                faults.push(format!("{}: {:?}: {fault}", path.display(), shown.words));
            }
        }
    }
    assert!(count > 60, "only {count} commands were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A run file's own comments say how it is used.
#[test]
fn every_command_in_the_run_files_parses() {
    let (mut count, mut faults) = (0, Vec::new());
    for path in files_below(&root().join("examples"), &["toml"]) {
        let text = fs_err::read_to_string(&path).expect("it is text");
        let text = text.replace("\\\n#", " ");
        let comments = text.lines().filter_map(|line| line.strip_prefix('#'));
        for words in comments.filter_map(command_in) {
            count += 1;
            let shown = Shown {
                kind: Kind::Line,
                words,
            };
            faults.extend(fault_of(&shown).map(|fault| format!("{}: {fault}", path.display())));
        }
    }
    assert!(count > 0, "no command was found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the blocks of a language in a Markdown text.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let starts = text.match_indices(&fence);
    let rests = starts.map(|(at, _)| &text[at + fence.len()..]);
    rests.filter_map(|rest| rest.split("```").next()).collect()
}

#[test]
fn every_piece_of_a_run_file_in_the_documents_is_one() {
    let (mut count, mut faults) = (0, Vec::new());
    for (path, text) in documents() {
        // What is of another program's file says so in its first line.
        let own = blocks(&text, "toml").into_iter();
        for block in own.filter(|block| !block.trim_start().starts_with("# for ")) {
            count += 1;
            if let Err(error) = RunConfig::from_toml(block, &[MODEL]) {
                faults.push(format!("{}: {error}\n{block}", path.display()));
            }
        }
    }
    assert!(count > 3, "only {count} blocks were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Files that the documents link to, or show as arguments of commands, are there.
#[test]
fn every_file_that_the_documents_name_is_there() {
    let mut missing = Vec::new();
    for (path, text) in documents() {
        let folder = path.parent().expect("it is in a folder");
        let links = text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split([')', '#']).next());
        for link in links.filter(|link| !link.is_empty() && !link.contains("://")) {
            if !folder.join(link).exists() {
                missing.push(format!("{}: {link}", path.display()));
            }
        }
        for shown in commands(&text) {
            for word in shown
                .words
                .iter()
                .filter(|word| word.starts_with("examples/"))
            {
                if !root().join(word).exists() {
                    missing.push(format!("{}: {word}", path.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn every_page_is_in_the_book() {
    let docs = root().join("docs");
    let summary = fs_err::read_to_string(docs.join("SUMMARY.md")).expect("it is text");
    for page in files_below(&docs, &["md"]) {
        let name = page
            .strip_prefix(&docs)
            .expect("it is below")
            .display()
            .to_string();
        let is_there = name == "SUMMARY.md" || summary.contains(&format!("({name})"));
        assert!(is_there, "docs/SUMMARY.md has no `{name}`");
    }
}
