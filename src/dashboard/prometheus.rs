//! Numbers of runs for Prometheus: the last row of each run that goes on.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;

use serde_json::Value;

use super::App;
use super::metrics::{Row, last_rows};
use super::runs::Run;
use crate::run::{LOAD, Phase};

/// Most runs that are told of, those that changed last: each has some hundred series.
const MAX_RUNS: usize = 20;

/// Writes what is known of the runs that go on.
pub(super) fn write(text: &mut String, app: &App) {
    let Ok((runs, _)) = app.config.runs.all() else {
        return;
    };
    // The latest come last.
    let running: Vec<(Run, u64)> = (runs.into_iter().rev())
        .filter_map(|run| {
            let (state, steps) = run.glance(&app.glances).progress();
            (state == Phase::Running).then_some((run, steps))
        })
        .take(MAX_RUNS)
        .collect();
    head(text, "run_step", "Steps that a run has done");
    for (run, steps) in &running {
        let _ = writeln!(text, "run_step{{run={}}} {steps}", label(&run.name));
    }
    let tables = [
        (
            "run_metric",
            "metrics.jsonl",
            "The last number that a run logged under a name",
        ),
        (
            "run_load",
            LOAD,
            "What a run takes of its machine, by name, as of some seconds ago",
        ),
    ];
    for (series, file, help) in tables {
        head(text, series, help);
        for (run, _) in &running {
            let opened = run.folder.file(file).ok();
            let numbers = opened.map(last_numbers).unwrap_or_default();
            for (name, value) in numbers {
                let (run, name) = (label(&run.name), label(&name));
                let _ = writeln!(text, "{series}{{run={run},name={name}}} {value}");
            }
        }
    }
}

fn head(text: &mut String, name: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
}

/// Returns the last number of each name in the last rows: measurements come seldom.
fn last_numbers(mut file: File) -> BTreeMap<String, f64> {
    let mut numbers = BTreeMap::new();
    for row in last_rows(&mut file).unwrap_or_default() {
        add(&mut numbers, "", &row);
        let gpus = row.get("gpus").and_then(Value::as_array);
        for gpu in gpus.into_iter().flatten().filter_map(Value::as_object) {
            let index = gpu.get("index").and_then(Value::as_u64).unwrap_or(0);
            add(&mut numbers, &format!("gpu/{index}/"), gpu);
        }
    }
    numbers
}

fn add(numbers: &mut BTreeMap<String, f64>, before: &str, row: &Row) {
    for (name, value) in row {
        if let Some(value) = value.as_f64()
            && !["step", "time", "index"].contains(&name.as_str())
        {
            numbers.insert(format!("{before}{name}"), value);
        }
    }
}

/// Returns the value of a label: runs are named by who starts them.
fn label(value: &str) -> String {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("\"{value}\"")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_last_number_of_each_name_is_told() {
        let mut file = tempfile::tempfile().unwrap();
        let rows = concat!(
            r#"{"step":1,"reward":0.25,"eval/pass_at_1":0.5}"#,
            "\n",
            r#"{"step":2,"reward":0.75,"anomalies":["flat"],"gpus":[{"index":1,"used":0.5}]}"#,
            "\n",
        );
        file.write_all(rows.as_bytes()).unwrap();
        let found: Vec<(String, f64)> = last_numbers(file).into_iter().collect();
        let expected = [
            ("eval/pass_at_1", 0.5),
            ("gpu/1/used", 0.5),
            ("reward", 0.75),
        ];
        assert_eq!(
            found,
            expected.map(|(name, value)| (name.to_owned(), value))
        );
    }

    #[test]
    fn a_name_cannot_end_its_label() {
        assert_eq!(label("a\"} 1\nb\\"), r#""a\"} 1\nb\\""#);
    }
}
