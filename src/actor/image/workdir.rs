//! The folder that programs of an image start in, by what its `Dockerfile` says.
//!
//! Backends of clusters start programs in a folder that the spec names, and do not know the image's own.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

/// Returns the folder of the last stage; none where it is that of an image of elsewhere, is made of variables, or
/// is `/`.
pub(super) fn of(dockerfile: &str) -> Option<PathBuf> {
    if has_other_escape(dockerfile) {
        return None;
    }
    let mut stages: HashMap<String, Option<PathBuf>> = HashMap::new();
    let (mut folder, mut name) = (None, None);
    for instruction in instructions(dockerfile) {
        let mut words = instruction.split_whitespace();
        let keyword = words.next().unwrap_or_default().to_ascii_uppercase();
        match keyword.as_str() {
            "FROM" => {
                if let Some(name) = name.take() {
                    stages.insert(name, folder.take());
                }
                let words: Vec<&str> = words.filter(|word| !word.starts_with("--")).collect();
                let base = words.first().copied().unwrap_or_default();
                folder = stages.get(&base.to_ascii_lowercase()).cloned().flatten();
                name = match words.get(1..3) {
                    Some([word, name]) if word.eq_ignore_ascii_case("as") => {
                        Some(name.to_ascii_lowercase())
                    }
                    _ => None,
                };
            }
            "WORKDIR" => {
                let rest = instruction.trim_start().get(keyword.len()..);
                folder = next(folder.as_deref(), rest.unwrap_or_default().trim());
            }
            _ => {}
        }
    }
    folder.filter(|folder| folder != Path::new("/"))
}

/// Returns where a `WORKDIR` leads, where that can be told.
fn next(from: Option<&Path>, text: &str) -> Option<PathBuf> {
    let text = text.trim_matches(['"', '\'']);
    if text.is_empty() || text.contains(['$', '\\', '"', '\'']) {
        return None;
    }
    let mut folder = match text.starts_with('/') {
        true => PathBuf::from("/"),
        false => from?.to_owned(),
    };
    for part in Path::new(text).components() {
        match part {
            Component::Normal(name) => folder.push(name),
            Component::ParentDir => {
                folder.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Some(folder)
}

/// Whether a line at its top says that lines go on behind something else than a backslash.
fn has_other_escape(dockerfile: &str) -> bool {
    let directives = dockerfile.lines().take_while(|line| line.starts_with('#'));
    let mut escapes = directives.filter_map(|line| {
        let (name, value) = line.trim_start_matches('#').split_once('=')?;
        (name.trim().eq_ignore_ascii_case("escape")).then(|| value.trim().to_owned())
    });
    escapes.any(|value| value != "\\")
}

/// Returns the instructions, each in one line, without comments and without documents within them.
fn instructions(dockerfile: &str) -> Vec<String> {
    let mut instructions = Vec::new();
    let mut lines = dockerfile.lines();
    let mut line_so_far = String::new();
    while let Some(line) = lines.next() {
        if line.trim_start().starts_with('#') || line.trim().is_empty() {
            continue;
        }
        if let Some(start) = line.trim_end().strip_suffix('\\') {
            line_so_far.push_str(start);
            continue;
        }
        line_so_far.push_str(line);
        let instruction = std::mem::take(&mut line_so_far);
        for end in documents(&instruction) {
            // What is in a document is no instruction.
            for inside in lines.by_ref() {
                if inside.trim_start_matches('\t') == end {
                    break;
                }
            }
        }
        instructions.push(instruction);
    }
    instructions
}

/// Returns the words that end the documents which follow an instruction (`RUN <<END`).
fn documents(instruction: &str) -> Vec<String> {
    let keyword = instruction.split_whitespace().next().unwrap_or_default();
    let takes_some = ["RUN", "COPY", "ADD"]
        .iter()
        .any(|taking| taking.eq_ignore_ascii_case(keyword));
    if !takes_some {
        return Vec::new();
    }
    let starts = instruction.split("<<").skip(1);
    let ends = starts.map(|rest| {
        let rest = rest.trim_start_matches('-').trim_start_matches(['"', '\'']);
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        rest.get(..end.unwrap_or(rest.len())).unwrap_or_default()
    });
    ends.filter(|end| end.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("FROM a\nWORKDIR /app\n", Some("/app"))]
    #[case("from a\n  workdir   /app/../b/./c \nRUN true\n", Some("/b/c"))]
    #[case("FROM a\nWORKDIR /x\nWORKDIR y\n", Some("/x/y"))]
    #[case("FROM a\nWORKDIR \"/with space\"\n", Some("/with space"))]
    #[case(
        "FROM a AS One\nWORKDIR /x\nFROM --platform=p one\nRUN true\n",
        Some("/x")
    )]
    #[case("FROM a AS b\nWORKDIR /x\nFROM b\nWORKDIR y", Some("/x/y"))]
    #[case("FROM a\nWORKDIR \\\n# why\n/x\n", Some("/x"))]
    #[case("FROM a\nWORKDIR /x\nRUN <<END\nWORKDIR /y\nEND\n", Some("/x"))]
    #[case("FROM a\nWORKDIR /x\nCOPY <<-'E' /f\n\tWORKDIR /y\n\tE\n", Some("/x"))]
    #[case("FROM a\nWORKDIR /x\nRUN echo $((1<<2))\nWORKDIR /y\n", Some("/y"))]
    // Not told by the file alone.
    #[case("FROM a\n", None)]
    #[case("FROM a\nWORKDIR y\n", None)]
    #[case("FROM a\nWORKDIR /x\nFROM b\n", None)]
    #[case("FROM a\nARG D=x\nWORKDIR /$D\n", None)]
    #[case("FROM a\nWORKDIR /\n", None)]
    #[case("# escape=`\nFROM a\nWORKDIR /x\n", None)]
    #[case("", None)]
    fn folders_are_found(#[case] dockerfile: &str, #[case] expected: Option<&str>) {
        assert_eq!(of(dockerfile).as_deref(), expected.map(Path::new));
    }
}
