//! The report of a run: one HTML page that needs nothing else.
//!
//! [`write_report`] reads a run folder and writes `report.html` into it: before and after, curves of
//! every metric, and episodes token by token with loss mask and log-probability. The page has no
//! external parts, so it can be sent, archived and read on a phone; a run that is still going, or was
//! stopped, has one too.

mod chart;
mod curves;
mod episodes;
mod error;
mod groups;

use std::path::{Path, PathBuf};

use fs_err as fs;
use minijinja::Environment;
use minijinja::value::Serde;
use serde::Serialize;

use self::curves::Curves;
use self::episodes::Example;
use crate::address::shown_in;
use crate::config::RunConfig;
use crate::run::{Change, Measured, Summary, write_atomically};

pub(crate) use self::episodes::token_texts;
pub use self::error::ReportError;
pub(crate) use self::groups::{CHARTS, INTERVALS};

const TEMPLATE: &str = include_str!("report.html");

/// Writes `report.html` into the run folder `run` and returns its path.
///
/// # Errors
///
/// Fails where the folder holds no run, or a file of it cannot be read or written.
pub fn write_report(run: &Path) -> Result<PathBuf, ReportError> {
    let page = render_report(run)?;
    let path = run.join("report.html");
    write_atomically(&path, page.as_bytes()).map_err(ReportError::Write)?;
    Ok(path)
}

/// Returns the report of the run folder `run`.
///
/// # Errors
///
/// Fails where the folder holds no run, or a file of it cannot be read.
pub fn render_report(run: &Path) -> Result<String, ReportError> {
    let config_path = run.join("run.toml");
    if !config_path.is_file() {
        return Err(ReportError::NoRun {
            path: run.to_owned(),
        });
    }
    let run_toml = fs::read_to_string(&config_path)?;
    // A report is worth having even where this version no longer knows a key of the run's.
    let config: Option<RunConfig> = toml::from_str(&run_toml).ok();
    let summary = read_summary(&run.join("summary.json"))?;
    let metrics = curves::read_metrics(&run.join("metrics.jsonl"))?;
    let model = config.as_ref().map(|config| config.model.path.clone());
    let root = run.canonicalize()?;
    let page = Page {
        name: root.file_name().map(|name| name.to_string_lossy().into()),
        tasks: config.as_ref().map(tasks),
        steps: metrics.steps,
        planned: config.map(|config| config.trainer.steps),
        measured: summary.as_ref().map(measured).unwrap_or_default(),
        summary: summary.as_ref().map(Headline::new),
        curves: metrics.curves(),
        episodes: episodes::read_examples(run, model.as_deref())?,
        model,
        // Who reads the report need not know the passwords of addresses.
        run_toml: shown_in(&run_toml),
        version: env!("CARGO_PKG_VERSION"),
    };
    page.render().map_err(ReportError::Template)
}

/// What the template fills in.
#[derive(Debug, Serialize)]
struct Page {
    name: Option<String>,
    model: Option<String>,
    tasks: Option<String>,
    /// Steps done.
    steps: u64,
    /// Steps that the run file asks for.
    planned: Option<u64>,
    measured: Vec<Card>,
    summary: Option<Headline>,
    curves: Curves,
    episodes: Vec<Example>,
    run_toml: String,
    version: &'static str,
}

impl Page {
    fn render(&self) -> Result<String, minijinja::Error> {
        let mut environment = Environment::new();
        // The name's ending turns on the escaping of HTML: texts of the policy are in the page.
        environment.add_template("report.html", TEMPLATE)?;
        environment.get_template("report.html")?.render(Serde(self))
    }
}

fn read_summary(path: &Path) -> Result<Option<Summary>, ReportError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read(path)?;
    let summary = serde_json::from_slice(&text).map_err(|source| ReportError::Summary {
        path: path.to_owned(),
        source,
    })?;
    Ok(Some(summary))
}

/// Returns what the run learns from, as the page's head says it.
fn tasks(config: &RunConfig) -> String {
    let environments: Vec<String> = (config.environments.iter())
        .map(|(name, environment)| {
            format!(
                "{name} ({}, weight {})",
                environment.path, environment.weight
            )
        })
        .collect();
    if environments.is_empty() {
        config.task.path.clone()
    } else {
        environments.join(", ")
    }
}

/// What became of some held-out tasks.
#[derive(Debug, Serialize)]
struct Card {
    /// The environment; none for all.
    name: Option<String>,
    bars: [Bar; 2],
    verdict: String,
    tasks: usize,
    samples: usize,
    unscorable: u64,
}

impl Card {
    fn new(name: Option<&String>, change: &Change) -> Self {
        Self {
            name: name.cloned(),
            bars: bars(change),
            verdict: verdict(change),
            tasks: change.after.tasks,
            samples: change.after.samples,
            unscorable: change.before.unscorable + change.after.unscorable,
        }
    }
}

/// Returns the cards of all held-out tasks, and of each environment's.
fn measured(summary: &Summary) -> Vec<Card> {
    let environments = summary.environments.iter();
    std::iter::once(Card::new(None, &summary.change))
        .chain(environments.map(|(name, change)| Card::new(Some(name), change)))
        .collect()
}

/// A pass rate and its interval, in percent.
#[derive(Debug, Serialize)]
struct Bar {
    label: &'static str,
    value: f64,
    low: f64,
    high: f64,
}

fn bars(change: &Change) -> [Bar; 2] {
    let bar = |label, measured: &Measured| Bar {
        label,
        value: 100.0 * measured.pass_at_1,
        low: 100.0 * measured.ci95[0],
        high: 100.0 * measured.ci95[1],
    };
    [bar("before", &change.before), bar("after", &change.after)]
}

/// Says whether it got better, and how surely.
fn verdict(change: &Change) -> String {
    change.difference.map_or_else(
        || "Before and after were measured on different tasks.".to_owned(),
        |difference| {
            let [low, high] = difference.ci95.map(|share| 100.0 * share);
            let change = 100.0 * difference.pass_at_1;
            let meaning = match (low > 0.0, high < 0.0) {
                (true, _) => "a significant rise",
                (_, true) => "a significant fall",
                _ => "no significant change",
            };
            format!(
                "{change:+.1} points ({low:+.1} to {high:+.1}, 95 % interval over tasks): {meaning}"
            )
        },
    )
}

/// What the page says of the whole run.
#[derive(Debug, Serialize)]
struct Headline {
    minutes: f64,
    tokens: u64,
    seed: u64,
}

impl Headline {
    fn new(summary: &Summary) -> Self {
        Self {
            minutes: summary.wall_s / 60.0,
            tokens: summary.tokens,
            seed: summary.seed,
        }
    }
}

#[cfg(test)]
mod tests {
    use indexmap::IndexMap;

    use super::*;
    use crate::trajectory::{Status, StepWriter, TokenTrace, Trajectory, Usage};

    fn run_with(task_id: &str) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join("run.toml"), "seed = 1\n").unwrap();
        let rows = "{\"step\": 1, \"reward\": 0.25}\n{\"step\": 2, \"reward\": 0.75}\n";
        fs::write(run.path().join("metrics.jsonl"), rows).unwrap();
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1]).unwrap();
        trace.push_sampled(&[2], &[-0.5]).unwrap();
        let mut writer = StepWriter::create(run.path(), 1).unwrap();
        let episode = Trajectory {
            task_id: task_id.to_owned(),
            group: 0,
            sample: 0,
            policy_step: 0,
            segments: Vec::new(),
            messages: vec![],
            turns: vec![],
            trace,
            reward: Some(0.25),
            rewards: IndexMap::new(),
            passed: Some(false),
            status: Status::Finished,
            usage: Usage::default(),
        };
        writer.append(&episode).unwrap();
        writer.finish().unwrap();
        run
    }

    #[test]
    fn a_run_that_still_goes_has_a_page() {
        let run = run_with("601");
        let page = fs::read_to_string(write_report(run.path()).unwrap()).unwrap();
        for part in [
            "The run is not finished",
            "points=\"0,80 320,0\"", // rewards on a plane from 0 to 0.75
            "Step 1, task 601: reward 0.25, finished, 1 tokens sampled",
            "<span class=\"s h1\" data-i=\"2\" data-l=\"-0.5\">[2]</span>",
            "seed = 1",
        ] {
            assert!(page.contains(part), "`{part}` is not in\n{page}");
        }
    }

    #[test]
    fn a_finished_run_says_what_it_came_to() {
        let run = run_with("601");
        let measured = serde_json::json!({
            "pass_at_1": 0.25, "ci95": [0.125, 0.375], "tasks": 8, "samples": 4, "unscorable": 1
        });
        let summary = serde_json::json!({
            "before": measured, "after": measured, "steps": 2, "wall_s": 90.0, "tokens": 12,
            "seed": 1, "difference": {"pass_at_1": 0.0, "ci95": [-0.125, 0.125]}
        });
        fs::write(run.path().join("summary.json"), summary.to_string()).unwrap();
        let page = render_report(run.path()).unwrap();
        let verdict =
            "+0.0 points (-12.5 to +12.5, 95 % interval over tasks): no significant change";
        assert!(page.contains(verdict), "{page}");
        assert!(page.contains("2 samples could not be scored"), "{page}");
        assert!(!page.contains("<h3>"), "there is one environment");
    }

    #[test]
    fn each_environment_has_a_card() {
        let run = run_with("code/601");
        let run_toml = "model.path = 'm'\nlog.http = 'http://me:secret@x/rows'\n[environments]\n\
                        code = {path = 'a.jsonl', weight = 3}\nmaths = {path = 'b.jsonl'}\n";
        fs::write(run.path().join("run.toml"), run_toml).unwrap();
        let change = |before: f64, after: f64| {
            let measured = |share: f64| {
                serde_json::json!({
                    "pass_at_1": share, "ci95": [share, share], "tasks": 8, "samples": 4, "unscorable": 0
                })
            };
            let difference = after - before;
            serde_json::json!({
                "before": measured(before), "after": measured(after),
                "difference": {"pass_at_1": difference, "ci95": [difference, difference]}
            })
        };
        let mut summary = change(0.25, 0.25);
        summary["environments"] =
            serde_json::json!({"code": change(0.0, 0.5), "maths": change(0.5, 0.0)});
        for (key, value) in [
            ("steps", 2.into()),
            ("wall_s", 90.0.into()),
            ("tokens", 12.into()),
        ] {
            summary[key] = value;
        }
        summary["seed"] = 1.into();
        fs::write(run.path().join("summary.json"), summary.to_string()).unwrap();
        let page = render_report(run.path()).unwrap();
        for part in [
            "m on code (a.jsonl, weight 3), maths (b.jsonl, weight 1)",
            "<h3>code</h3>",
            "+50.0 points (+50.0 to +50.0, 95 % interval over tasks): a significant rise",
            "<h3>maths</h3>",
            "-50.0 points (-50.0 to -50.0, 95 % interval over tasks): a significant fall",
            // The rest of the address is hidden.
            "http:&#x2f;&#x2f;…@x&#x2f;rows",
        ] {
            assert!(page.contains(part), "`{part}` is not in\n{page}");
        }
    }

    #[test]
    fn what_a_policy_or_a_task_says_is_text() {
        let run = run_with("<script>alert(1)</script>");
        let page = render_report(run.path()).unwrap();
        assert!(!page.contains("<script>alert"), "{page}");
        assert!(page.contains("&lt;script&gt;alert(1)"), "{page}");
    }

    #[test]
    fn a_folder_without_a_run_is_refused() {
        let error = render_report(Path::new("/nowhere")).unwrap_err();
        assert!(matches!(error, ReportError::NoRun { .. }), "{error}");
    }
}
