//! What `docs/metrics.md` and the Grafana dashboard name, held against the program.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde_json::Value;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs_err::read_to_string(path).expect("the file is there")
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        match path.is_dir() {
            true => found.extend(sources(&path)),
            false => found.push(path),
        }
    }
    found
}

fn found(pattern: &str, text: &str) -> BTreeSet<String> {
    let pattern = Regex::new(pattern).expect("it is one");
    let all = pattern.captures_iter(text);
    all.map(|found| found[1].to_owned()).collect()
}

/// Names that the program writes for Prometheus: those of the files that do, without their tests.
fn written() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in sources(&root) {
        if path.ends_with("tests.rs") {
            continue;
        }
        let text = fs_err::read_to_string(&path).unwrap_or_default();
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        names.extend(found(r"# TYPE ([a-z_]+) ", text));
        if ["# TYPE {name}", "series(", ".write("]
            .iter()
            .any(|mark| text.contains(mark))
        {
            let name = r#""((?:http|engine|completion|openenv|proxy|run)_[a-z_]+)""#;
            names.extend(found(name, text));
        }
    }
    // What is no name of a series.
    names.retain(|name| !["http_proxy", "run_python", "run_toml"].contains(&name.as_str()));
    names
}

fn documented() -> BTreeSet<String> {
    found(
        r"(?m)^\| `([a-z_]+)` \| (?:counter|gauge|histogram) \|",
        &read("docs/metrics.md"),
    )
}

#[test]
fn the_page_names_what_is_written_and_nothing_else() {
    let (written, documented) = (written(), documented());
    assert!(written.len() > 25, "{written:?}");
    assert_eq!(written, documented);
}

#[test]
fn the_grafana_dashboard_asks_for_what_there_is() {
    let board: Value = serde_json::from_str(&read("deploy/grafana/wardian.json")).expect("JSON");
    let documented = documented();
    let panels = board["panels"].as_array().expect("panels");
    let mut asked = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64()), "{panel}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let asks = target["expr"].as_str().expect("an expression");
            asked.extend(found(r"\b([a-z]+_[a-z_]+)(?:\{|\[|\))", asks));
            numbers.extend(found(r#"name=~?"([^"]+)""#, asks));
        }
    }
    for name in asked.iter().filter(|name| *name != "histogram_quantile") {
        let of_histogram = ["_bucket", "_sum", "_count"];
        let base = of_histogram.iter().find_map(|end| name.strip_suffix(end));
        assert!(
            documented.contains(base.unwrap_or(name)),
            "no `{name}` is written"
        );
    }
    assert!(
        asked.len() > 20 && numbers.len() > 20,
        "{asked:?} {numbers:?}"
    );
    // Names of numbers: each is a key of a row, as it is written there.
    let mut text: String = ["run/metrics.rs", "run/load/mod.rs", "run/load/host.rs"]
        .map(|path| read(&format!("src/{path}")))
        .concat();
    for path in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/trainer/grpo")) {
        text += &fs_err::read_to_string(path).expect("it is text");
    }
    for name in &numbers {
        let key = name
            .trim_start_matches("gpu/[0-9]+/")
            .trim_end_matches(".+");
        let is_written = match name == key {
            true => {
                text.contains(&format!("\"{key}\""))
                    || text.contains(&format!("pub {key}:"))
                    || text.contains(&format!("pub(super) {key}:"))
            }
            false if name.starts_with("gpu/") => {
                read("src/run/load/gpus.rs").contains(&format!("{key}: "))
            }
            false => text.contains(&format!("\"{key}")),
        };
        assert!(is_written, "no row has `{name}`");
    }
}
