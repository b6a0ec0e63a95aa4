//! The metrics of a run as charts.

use std::collections::BTreeMap;
use std::path::Path;

use fs_err as fs;
use serde::Serialize;
use serde_json::{Map, Value};

use super::ReportError;
use super::chart::{Chart, Line, Point};
use super::groups::{CHARTS, INTERVALS};

/// What `metrics.jsonl` holds.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    /// The last step.
    pub(super) steps: u64,
    series: BTreeMap<String, Vec<Point>>,
}

/// Charts that are shown at once, and those behind a fold.
#[derive(Debug, Serialize)]
pub(super) struct Curves {
    main: Vec<Chart>,
    others: Vec<Chart>,
}

/// Reads `metrics.jsonl`. A last line that a crash cut off is left out.
pub(super) fn read_metrics(path: &Path) -> Result<Metrics, ReportError> {
    if !path.exists() {
        return Ok(Metrics::default());
    }
    let text = fs::read_to_string(path)?;
    let mut metrics = Metrics::default();
    let whole = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    for (number, line) in whole.enumerate() {
        let row = serde_json::from_str(line).map_err(|source| ReportError::Metrics {
            path: path.to_owned(),
            line: number + 1,
            source,
        })?;
        metrics.add(&row);
    }
    Ok(metrics)
}

impl Metrics {
    fn add(&mut self, row: &Map<String, Value>) {
        let Some(step) = row.get("step").and_then(Value::as_u64) else {
            return;
        };
        self.steps = self.steps.max(step);
        for (name, value) in row {
            let Some(value) = value.as_f64().filter(|_| name != "step") else {
                continue;
            };
            let point = Point {
                step: step as f64,
                value,
                interval: interval(row, name),
            };
            self.series.entry(name.clone()).or_default().push(point);
        }
    }

    /// Returns the charts.
    pub(super) fn curves(&self) -> Curves {
        let main = CHARTS.iter().filter_map(|group| {
            let names = group.names.iter();
            let lines: Vec<Line> = names.flat_map(|name| self.lines(name)).collect();
            Chart::new(group.title, &lines)
        });
        let is_named = |name: &str| {
            let mut patterns = CHARTS.iter().flat_map(|group| group.names);
            patterns.any(|pattern| matches(pattern, name))
        };
        let others = self.series.keys().filter(|name| !is_named(name));
        Curves {
            main: main.collect(),
            others: others
                .filter_map(|name| Chart::new(name, &self.lines(name)))
                .collect(),
        }
    }

    fn lines(&self, pattern: &str) -> Vec<Line> {
        let found = self
            .series
            .iter()
            .filter(|(name, _)| matches(pattern, name));
        found
            .map(|(name, points)| Line {
                name: name.clone(),
                points: points.clone(),
            })
            .collect()
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    }
}

fn interval(row: &Map<String, Value>, name: &str) -> Option<[f64; 2]> {
    let (_, key) = INTERVALS.iter().find(|(metric, _)| *metric == name)?;
    let ends = row.get(*key)?.as_array()?;
    Some([ends.first()?.as_f64()?, ends.get(1)?.as_f64()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(rows: &[Value]) -> Metrics {
        let mut metrics = Metrics::default();
        for row in rows {
            metrics.add(row.as_object().unwrap());
        }
        metrics
    }

    #[test]
    fn every_metric_is_in_a_chart() {
        let found = metrics(&[
            serde_json::json!({"step": 1, "reward": 0.5, "rewards/passed/mean": 0.5, "novel": 2}),
            serde_json::json!({"step": 1, "eval/pass_at_1": 0.4, "eval/ci95": [0.3, 0.5]}),
            serde_json::json!({"step": 2, "reward": 0.7, "rewards/passed/mean": 0.7, "novel": null}),
        ]);
        assert_eq!(found.steps, 2);
        let page = serde_json::to_value(found.curves()).unwrap();
        let titles = |charts: &Value| -> Vec<String> {
            let charts = charts.as_array().unwrap();
            charts
                .iter()
                .map(|chart| chart["title"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(
            titles(&page["main"]),
            ["Reward", "Parts of the reward, mean", "Held-out pass@1"]
        );
        assert_eq!(titles(&page["others"]), ["novel"]);
        let whiskers = &page["main"][2]["lines"][0]["whiskers"];
        assert_eq!(*whiskers, serde_json::json!([[160.0, 120.0, 0.0]]));
    }

    #[test]
    fn a_line_that_was_cut_off_is_left_out_and_a_broken_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\": 1, \"loss\": 2.0}\n{\"step\": 2, \"lo").unwrap();
        assert_eq!(read_metrics(&path).unwrap().steps, 1);
        fs::write(&path, "{\"step\": 1}\n[]\n").unwrap();
        let error = read_metrics(&path).unwrap_err();
        assert!(error.to_string().starts_with("line 2 of"), "{error}");
    }
}
