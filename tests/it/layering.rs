//! The direction of dependencies between the rooms, and that no test file is forgotten.
//!
//! The scanner reads `crate::room` paths in the text of the sources, test modules included. It does
//! not expand macros.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Each room and the rooms it may use, bottom first; [`ABOVE`] stands for every row above it.
const LAYERS: &[(&str, &[&str])] = &[
    ("address", &[]),
    ("causes", &[]),
    ("lines", &[]),
    ("process", &[]),
    ("hub", &[]),
    ("chat", &[]),
    ("http", &["causes"]),
    ("collective", &[]),
    ("actor", &["causes", "http", "process"]),
    ("sandbox", &["causes"]),
    ("engine", &["hub"]),
    ("grader", &["causes", "sandbox"]),
    (
        "task",
        &["address", "causes", "grader", "hub", "lines", "process"],
    ),
    ("trajectory", &["chat", "lines"]),
    ("openai", &["causes", "chat", "engine", "http"]),
    (
        "proxy",
        &["address", "chat", "engine", "http", "openai", "trajectory"],
    ),
    (
        "env",
        &[
            "actor",
            "causes",
            "chat",
            "grader",
            "sandbox",
            "task",
            "trajectory",
        ],
    ),
    (
        "openenv",
        &[
            "actor", "address", "causes", "chat", "env", "grader", "http", "process", "sandbox",
            "task",
        ],
    ),
    (
        "rollout",
        &[
            "actor",
            "causes",
            "chat",
            "engine",
            "env",
            "http",
            "openai",
            "process",
            "proxy",
            "task",
            "trajectory",
        ],
    ),
    (
        "trainer",
        &["collective", "engine", "rollout", "trajectory"],
    ),
    (
        "eval",
        &[
            "address",
            "chat",
            "env",
            "http",
            "lines",
            "proxy",
            "rollout",
            "task",
            "trajectory",
        ],
    ),
    ("config", &["address", "chat", "grader", "sandbox", "task"]),
    ("run", &[ABOVE]),
    (
        "report",
        &["address", "config", "engine", "run", "trajectory"],
    ),
    (
        "dashboard",
        &[
            "address",
            "chat",
            "config",
            "engine",
            "http",
            "report",
            "run",
            "trajectory",
        ],
    ),
    ("cli", &[ABOVE]),
];

const ABOVE: &str = "everything above";

/// Whether `room` may use `used`.
fn is_allowed(room: &str, used: &str) -> bool {
    let position = |name: &str| LAYERS.iter().position(|(row, _)| *row == name);
    let Some((row, target)) = position(room).zip(position(used)) else {
        return false;
    };
    let uses = LAYERS[row].1;
    uses.contains(&used) || (uses == [ABOVE] && target < row)
}

#[test]
fn rows_name_only_earlier_rows() {
    let mut earlier: BTreeSet<&str> = BTreeSet::new();
    for (room, uses) in LAYERS {
        for used in uses.iter().filter(|used| **used != ABOVE) {
            assert!(
                earlier.contains(used),
                "`{room}` names `{used}`, which is not above it"
            );
        }
        assert!(earlier.insert(room), "`{room}` has two rows");
    }
}

#[test]
fn every_room_has_a_row() {
    for path in entries(&root().join("src")) {
        let room = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .expect("names are UTF-8");
        let known = LAYERS.iter().any(|(name, _)| *name == room);
        assert!(
            known || ["lib", "main"].contains(&room),
            "`{room}` has no row in LAYERS"
        );
    }
}

#[test]
fn rooms_use_only_the_rooms_above_them() {
    let source_root = root().join("src");
    let mut faults = Vec::new();
    let mut edges = 0;
    for path in rust_files(&source_root) {
        let inside = path
            .strip_prefix(&source_root)
            .expect("files are inside src");
        let Some(room) = room_of(inside) else {
            continue;
        };
        let source = fs_err::read_to_string(&path).expect("sources are readable");
        for used in used_rooms(&source) {
            edges += usize::from(used != room);
            if !may_use(&room, &used) {
                faults.push(format!("{}: `{room}` uses `{used}`", inside.display()));
            }
        }
    }
    assert!(
        faults.is_empty(),
        "forbidden dependencies:\n{}",
        faults.join("\n")
    );
    assert!(edges > 0, "the scanner saw no dependency at all");
}

#[test]
fn the_scanner_finds_each_way_to_write_a_path() {
    let found = |source: &str| used_rooms(source).into_iter().collect::<Vec<_>>();
    assert_eq!(found("use crate::sandbox::Limits;"), ["sandbox"]);
    assert_eq!(found("fn f() -> crate :: engine::Engine {}"), ["engine"]);
    assert_eq!(
        found("use crate::{chat::{self, Message}, trainer, env as e};"),
        ["chat", "env", "trainer"]
    );
    assert_eq!(found("use {crate::grader::Verdict, std::fmt};"), ["grader"]);
    assert_eq!(found("pub(crate) use crate::task;"), ["task"]);
    assert_eq!(
        found("macro_rules! m { () => { $crate::eval::f() } }"),
        ["eval"]
    );
    assert_eq!(
        found("#[cfg(test)] mod tests { use crate::rollout::Group; }"),
        ["rollout"]
    );
    assert_eq!(found("mod a { use super::super::cli::Args; }"), ["cli"]);
    assert_eq!(
        found("let c = 'c'; let q = '\"'; crate::hub::x(); let s = \"\";"),
        ["hub"]
    );
    assert_eq!(
        found("fn f<'a>(x: &'a crate::config::RunConfig) {}"),
        ["config"]
    );
}

#[test]
fn the_scanner_skips_comments_strings_and_own_items() {
    let source = r####"
        //! See [`crate::trainer`].
        /* crate::cli /* crate::cli */ crate::cli */
        const A: &str = "crate::cli \" crate::cli";
        const B: &str = r#"crate::cli " crate::cli"#;
        const C: &[u8] = b"crate::cli";
        use super::cli;
        use crate::RootReexport;
        use super::super::helper;
    "####;
    assert_eq!(
        used_rooms(source).into_iter().collect::<Vec<_>>(),
        ["RootReexport"]
    );
}

#[test]
fn a_forbidden_edge_is_a_fault() {
    for (room, used, allowed) in [
        ("sandbox", "engine", false),
        ("engine", "sandbox", false),
        ("trajectory", "chat", true),
        ("task", "task", true),
        ("trainer", "RunConfig", false), // a re-export of the root hides its room
        ("cli", "config", true),
        ("unknown", "chat", false),
    ] {
        assert_eq!(may_use(room, used), allowed, "{room} -> {used}");
    }
}

#[test]
fn every_test_file_is_in_the_test_binary() {
    let tests = root().join("tests/it");
    let mut reached = BTreeSet::new();
    reach(&tests.join("main.rs"), &tests, &mut reached);
    let forgotten: Vec<_> = rust_files(&tests)
        .into_iter()
        .filter(|path| !reached.contains(path))
        .collect();
    assert!(forgotten.is_empty(), "no `mod` line reaches {forgotten:?}");
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Whether `room` may name `used`. A name that is no room is a re-export of the root, which is for
/// users of the library and hides which room is meant.
fn may_use(room: &str, used: &str) -> bool {
    room == used || is_allowed(room, used)
}

/// Returns the room a file belongs to; the roots of the library and the binary belong to none.
fn room_of(inside: &Path) -> Option<String> {
    let first = inside.components().next()?.as_os_str().to_str()?;
    let room = first.strip_suffix(".rs").unwrap_or(first);
    (!["lib", "main"].contains(&room)).then(|| room.to_owned())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs_err::read_dir(folder)
        .expect("the folder is readable")
        .map(|entry| entry.expect("the entry is readable").path())
        .collect();
    paths.sort();
    paths
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in entries(folder) {
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// Collects the files that `mod name;` lines reach, starting at `file`, whose modules are in
/// `folder`.
fn reach(file: &Path, folder: &Path, reached: &mut BTreeSet<PathBuf>) {
    reached.insert(file.to_owned());
    let source = fs_err::read_to_string(file).expect("test files are readable");
    let words = words(&source);
    for window in words.windows(3) {
        let [keyword, name, end] = window else {
            continue;
        };
        if keyword != "mod" || end != ";" {
            continue;
        }
        let nested = folder.join(name);
        for path in [folder.join(format!("{name}.rs")), nested.join("mod.rs")] {
            if path.exists() {
                reach(&path, &nested, reached);
            }
        }
    }
}

/// Returns the first segments of all `crate::` paths, and the rooms after `super::super::`.
fn used_rooms(source: &str) -> BTreeSet<String> {
    let words = words(source);
    let mut rooms = BTreeSet::new();
    let after_path = |at: usize| {
        words
            .get(at)
            .is_some_and(|word| word == "::")
            .then_some(at + 1)
    };
    for (at, word) in words.iter().enumerate() {
        let escapes = word == "super"
            && after_path(at + 1).is_some_and(|next| words.get(next).is_some_and(|w| w == "super"));
        if escapes {
            if let Some(name) = after_path(at + 3).and_then(|next| words.get(next)) {
                // One `super` too many reaches the root; a name that is no room stays inside.
                if LAYERS.iter().any(|(room, _)| room == name) {
                    rooms.insert(name.clone());
                }
            }
        } else if word == "crate"
            && let Some(next) = after_path(at + 1)
        {
            rooms.extend(first_segments(&words, next));
        }
    }
    rooms
}

/// Returns the name at `at`, or the first names of the group that opens there.
fn first_segments(words: &[String], at: usize) -> Vec<String> {
    if words.get(at).is_none_or(|word| word != "{") {
        return words.get(at).cloned().into_iter().collect();
    }
    let mut names = Vec::new();
    let mut depth = 0;
    let mut expecting = false;
    for word in &words[at..] {
        match word.as_str() {
            "{" => {
                depth += 1;
                expecting = depth == 1;
            }
            "}" => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            "," => expecting = depth == 1,
            name if expecting => {
                names.push(name.to_owned());
                expecting = false;
            }
            _ => {}
        }
    }
    names
}

/// Splits Rust into identifiers and punctuation, without comments, strings, characters, lifetimes
/// and numbers; `::` is one word.
fn words(source: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_length(rest)
        } else if let Some(length) = string_length(rest) {
            length
        } else if first == '\'' {
            character_length(rest)
        } else if first.is_alphanumeric() || first == '_' {
            let length = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            if !first.is_ascii_digit() {
                words.push(rest[..length].to_owned());
            }
            length
        } else if rest.starts_with("::") {
            words.push("::".to_owned());
            2
        } else {
            if !first.is_whitespace() {
                words.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    words
}

fn block_comment_length(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Returns the length of the string literal that `text` opens with, if it does.
fn string_length(text: &str) -> Option<usize> {
    let body = text.trim_start_matches(['b', 'c']);
    let prefix = text.len() - body.len();
    if prefix > 1 {
        return None;
    }
    if let Some(raw) = body.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let inner = raw[hashes..].strip_prefix('"')?;
        let close = format!("\"{}", "#".repeat(hashes));
        let end = inner
            .find(&close)
            .map_or(inner.len(), |at| at + close.len());
        return Some(prefix + 1 + hashes + 1 + end);
    }
    let inner = body.strip_prefix('"')?;
    let mut escaped = false;
    for (at, c) in inner.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return Some(prefix + 1 + at + 1),
            _ => {}
        }
    }
    Some(text.len())
}

/// Returns the length of a character literal, or of the quote of a lifetime.
fn character_length(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => {
            let close = chars.skip(1).find(|(_, c)| *c == '\'');
            close.map_or(text.len(), |(at, _)| at + 1)
        }
        Some(_) => chars
            .next()
            .filter(|(_, c)| *c == '\'')
            .map_or(1, |(at, _)| at + 1),
        None => 1,
    }
}
