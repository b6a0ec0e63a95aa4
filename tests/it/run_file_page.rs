//! `docs/run-file.md` says what the code's documentation says of each key.
//!
//! After a change of a key, `WARDIAN_UPDATE=1 cargo test --test it run_file_page` writes it anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

const INTRODUCTION: &str = "\
# The run file

One TOML file describes a run. Keys that are left out have the defaults named here, a `preset` replaces
defaults, the file goes before its preset, and `--set section.key=value` before the file; a preset that
`--set` names goes before the file, too. `wardian train` leaves the resolved file in the run folder as
`run.toml`, and `wardian train --config` reads it back.

The name `starter` stands for what the binary carries: its model as `model.path` or `--model`, its tasks as
`task.path` or `--tasks` of `wardian train`. Other commands take tasks from a file (`examples/starter/tasks`).

The page is written from the documentation in `src/config/`.
";

/// The files that hold the structures of a run file.
const SOURCES: [&str; 9] = [
    "src/config/mod.rs",
    "src/config/environment.rs",
    "src/config/actor.rs",
    "src/config/image_build.rs",
    "src/config/kubernetes.rs",
    "src/config/openenv_actors.rs",
    "src/config/remote.rs",
    "src/config/substrate.rs",
    "src/grader/reward.rs",
];

#[derive(Debug, Default)]
struct Item {
    is_enum: bool,
    documentation: String,
    renames: String,
    /// (name, type, documentation) of fields or variants.
    members: Vec<(String, String, String)>,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the public structures and enumerations of a source file by name.
fn items(source: &str) -> BTreeMap<String, Item> {
    let mut items = BTreeMap::new();
    let mut documentation = String::new();
    let mut renames = String::new();
    let mut open: Option<(String, Item)> = None;
    let mut is_in_attribute = false;
    for line in source.lines() {
        let text = line.trim();
        // An attribute over several lines is not a member.
        if is_in_attribute || text == "#[serde(" {
            is_in_attribute = text != ")]";
            continue;
        }
        let begins = |word: &str| Some(text.strip_prefix(word)?.strip_suffix(" {")?.to_owned());
        if let Some(doc) = text.strip_prefix("///") {
            documentation.push_str(doc.trim_start());
            documentation.push(' ');
        } else if let Some(rule) = text.strip_prefix("#[serde(rename_all = \"") {
            renames = rule.trim_end_matches("\")]").to_owned();
        } else if let Some(name) = begins("pub struct ").or_else(|| begins("pub enum ")) {
            let item = Item {
                is_enum: text.starts_with("pub enum"),
                documentation: std::mem::take(&mut documentation).trim().to_owned(),
                renames: std::mem::take(&mut renames),
                members: Vec::new(),
            };
            open = Some((name, item));
        } else if text == "}" {
            items.extend(open.take());
            documentation.clear();
        } else if let Some((_, item)) = &mut open
            && let Some(member) = text.strip_suffix(',')
            && !text.starts_with('#')
        {
            let (name, kind) = match member.strip_prefix("pub ") {
                Some(field) => field.split_once(": ").expect("a field has a type"),
                None => (member, ""),
            };
            let documentation = std::mem::take(&mut documentation);
            item.members.push((
                name.to_owned(),
                kind.to_owned(),
                documentation.trim().to_owned(),
            ));
        }
    }
    items
}

/// Returns the name of a variant as a run file has it.
fn value_name(variant: &str, renames: &str) -> String {
    let separator = match renames {
        "snake_case" => "_",
        "kebab-case" => "-",
        _ => "",
    };
    let mut name = String::new();
    for letter in variant.chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push_str(separator);
        }
        name.extend(letter.to_lowercase());
    }
    name
}

/// Links of the code's documentation have no meaning on the page.
fn plain(documentation: &str) -> String {
    let mut text = documentation.replace('|', "\\|");
    while let Some(start) = text.find("](crate::") {
        let end = start + text[start..].find(')').expect("a link ends");
        text.replace_range(start..=end, "");
        let bracket = text[..start].rfind('[').expect("a link begins");
        text.remove(bracket);
    }
    text.replace("[`RewardTerms`]", "`RewardTerms`")
}

fn page() -> String {
    let mut known = BTreeMap::new();
    for path in SOURCES {
        let source = fs_err::read_to_string(root().join(path)).expect("the source is there");
        known.extend(items(&source));
    }
    let mut page = INTRODUCTION.to_owned();
    let (sections, top): (Vec<_>, Vec<_>) = known["RunConfig"]
        .members
        .iter()
        .map(|(name, kind, documentation)| {
            // A section of each name that the file gives.
            let named = kind.strip_prefix("BTreeMap<String, ");
            match named.and_then(|kind| kind.strip_suffix('>')) {
                Some(kind) => (format!("{name}.NAME"), kind, documentation),
                None => (name.clone(), given(kind), documentation),
            }
        })
        .partition(|(_, kind, _)| known.contains_key(*kind));
    page.push_str("\n| key | |\n|---|---|\n");
    for (name, _, documentation) in top {
        writeln!(page, "| `{name}` | {} |", plain(documentation)).expect("a string takes all");
    }
    for (section, kind, documentation) in sections {
        write_section(&mut page, &known, &section, kind, documentation);
    }
    page
}

/// Returns the type of what is given, where it need not be.
fn given(kind: &str) -> &str {
    let inner = kind.strip_prefix("Option<");
    inner
        .and_then(|inner| inner.strip_suffix('>'))
        .unwrap_or(kind)
}

/// Writes a section's keys, and then the sections in it.
fn write_section(
    page: &mut String,
    known: &BTreeMap<String, Item>,
    section: &str,
    kind: &str,
    documentation: &str,
) {
    let introduction = plain(documentation);
    write!(
        page,
        "\n## `[{section}]`\n\n{introduction}\n\n| key | |\n|---|---|\n"
    )
    .expect("a string takes all");
    // What has a section already is not written once more.
    let of_the_file = &known["RunConfig"].members;
    let is_of_the_file = |kind: &str| of_the_file.iter().any(|(_, of, _)| given(of) == kind);
    let mut inner_sections = Vec::new();
    for (name, kind, documentation) in &known[kind].members {
        write!(page, "| `{name}` | {}", plain(documentation)).expect("a string takes all");
        let inner = given(kind);
        match known.get(inner) {
            Some(choice) if choice.is_enum => {
                for (variant, _, documentation) in &choice.members {
                    let value = value_name(variant, &choice.renames);
                    write!(page, "<br>`{value}`: {}", plain(documentation))
                        .expect("a string takes all");
                }
            }
            Some(section) if !is_of_the_file(inner) => {
                inner_sections.push((name, inner, &section.documentation));
            }
            _ => {}
        }
        page.push_str(" |\n");
    }
    for (name, kind, documentation) in inner_sections {
        let section = format!("{section}.{name}");
        write_section(page, known, &section, kind, documentation);
    }
}

#[test]
fn the_page_says_what_the_code_says() {
    let path = root().join("docs/run-file.md");
    let page = page();
    if std::env::var_os("WARDIAN_UPDATE").is_some() {
        fs_err::write(&path, &page).expect("the page can be written");
    }
    let written = fs_err::read_to_string(&path).expect("the page is there");
    assert!(
        written == page,
        "`docs/run-file.md` is out of date: WARDIAN_UPDATE=1 cargo test --test it run_file_page"
    );
}

#[test]
fn every_key_of_a_run_is_on_the_page() {
    let page = page();
    let carried = root().join("examples/starter/run.toml");
    let text = fs_err::read_to_string(carried).expect("the file is there");
    for line in text.lines() {
        if let Some((key, _)) = line.split_once(" = ") {
            assert!(
                page.contains(&format!("| `{key}` |")),
                "`{key}` is not on the page"
            );
        }
    }
    for (key, value) in [("loss", "dr_grpo"), ("mode", "lora"), ("dtype", "bf16")] {
        let row = page
            .lines()
            .find(|line| line.starts_with(&format!("| `{key}` |")))
            .expect("the key has a row");
        assert!(row.contains(&format!("<br>`{value}`: ")), "{row}");
    }
    assert!(!page.contains("crate::"), "no link into the code is left");
}

#[test]
fn the_scanner_reads_fields_and_variants() {
    let found = items(
        "/// Doc.\n#[serde(rename_all = \"snake_case\")]\npub enum Loss {\n    /// One.\n    DrGrpo,\n}\n\
         pub struct A {\n    /// Two\n    /// lines.\n    #[serde(default)]\n    pub b: Option<Loss>,\n    /// Three.\n    \
         #[serde(\n        with = \"x\",\n        default\n    )]\n    pub c: u64,\n}\n",
    );
    let member =
        |name: &str, kind: &str, text: &str| (name.to_owned(), kind.to_owned(), text.to_owned());
    assert_eq!(found["Loss"].members, [member("DrGrpo", "", "One.")]);
    assert_eq!(value_name("DrGrpo", &found["Loss"].renames), "dr_grpo");
    assert_eq!(
        found["A"].members,
        [
            member("b", "Option<Loss>", "Two lines."),
            member("c", "u64", "Three.")
        ]
    );
}
