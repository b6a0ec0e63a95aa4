//! What is asked and answered.

use std::io;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::Refusal;
use super::index::{Entry, Index};
use super::metrics::{Place, read_rows};
use super::runs::Run;
use super::{App, assets, episode as view};
use crate::http::metrics_page;
use crate::report::{CHARTS, INTERVALS};
use crate::trajectory::Trajectory;

type Shared = State<Arc<App>>;
type Answer = Result<Response, Refusal>;

/// Most episodes of a page.
const MAX_PAGE: usize = 200;

pub(super) async fn page() -> Response {
    text("text/html; charset=utf-8", assets::PAGE)
}

pub(super) async fn asset(Path(name): Path<String>) -> Answer {
    let (kind, body) = assets::asset(&name).ok_or_else(|| Refusal::NotFound {
        what: "such file".to_owned(),
    })?;
    Ok(text(kind, body))
}

fn text(kind: &'static str, body: &'static str) -> Response {
    (
        [
            (header::CONTENT_TYPE, kind),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        body,
    )
        .into_response()
}

pub(super) async fn health() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

pub(super) async fn counts(State(app): Shared) -> Response {
    let mut text = String::new();
    app.responses.write(&mut text);
    if let Some(limit) = &app.rate_limit {
        limit.write(&mut text);
    }
    metrics_page(text)
}

pub(super) async fn nothing() -> Refusal {
    Refusal::NotFound {
        what: "such page".to_owned(),
    }
}

pub(super) async fn read_only() -> Refusal {
    Refusal::ReadOnly
}

pub(super) async fn about() -> Response {
    Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

pub(super) async fn charts() -> Response {
    Json(json!({"charts": CHARTS, "intervals": INTERVALS})).into_response()
}

/// Reads files on a thread that may wait for them, a few requests at a time. Who goes away leaves the work
/// under way to its end, which counts as long as it takes.
async fn reading<T: Serialize + 'static>(
    app: Arc<App>,
    read: impl FnOnce(&App) -> Result<T, Refusal> + Send + 'static,
) -> Answer {
    let internal = |reason: String| Refusal::Internal { reason };
    let permit = Arc::clone(&app.readers).acquire_owned().await;
    let permit = permit.map_err(|error| internal(error.to_string()))?;
    let work = move || {
        let body = read(&app).and_then(|found| {
            serde_json::to_vec(&found).map_err(|error| internal(error.to_string()))
        });
        drop(permit);
        body
    };
    let body = tokio::task::spawn_blocking(work).await;
    let body = body.map_err(|error| internal(error.to_string()))??;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

pub(super) async fn runs(State(app): Shared) -> Answer {
    reading(app, |app| {
        let found = app.config.runs.all();
        let (runs, is_cut_off) =
            found.map_err(|error| Refusal::of_file(&error, "the folder of runs"))?;
        let runs: Vec<_> = runs.iter().map(Run::glance).collect();
        Ok(json!({"runs": runs, "is_cut_off": is_cut_off}))
    })
    .await
}

pub(super) async fn run(State(app): Shared, Path(name): Path<String>) -> Answer {
    reading(app, move |app| {
        let run = app.config.runs.get(&name)?;
        Ok(json!({"run": run.glance(), "run_toml": run.run_toml()}))
    })
    .await
}

/// Where to go on in `metrics.jsonl`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct From {
    file: u64,
    offset: u64,
    every: u64,
}

pub(super) async fn metrics(
    State(app): Shared,
    Path(name): Path<String>,
    Query(from): Query<From>,
) -> Answer {
    reading(app, move |app| {
        let run = app.config.runs.get(&name)?;
        let place = Place {
            file: from.file,
            offset: from.offset,
        };
        let mut file = match run.folder.file("metrics.jsonl") {
            // A run before its first step.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(json!({
                    "rows": [], "broken": 0, "file": "0", "offset": 0,
                    "is_anew": true, "has_more": false,
                }));
            }
            file => file.map_err(|error| Refusal::of_file(&error, "metrics.jsonl"))?,
        };
        let rows = read_rows(&mut file, place, from.every);
        Ok(json!(rows.map_err(|error| Refusal::of_file(
            &error,
            "metrics.jsonl"
        ))?))
    })
    .await
}

pub(super) async fn steps(State(app): Shared, Path(name): Path<String>) -> Answer {
    reading(app, move |app| {
        let run = app.config.runs.get(&name)?;
        let names = match run
            .folder
            .folder("rollouts")
            .and_then(|folder| folder.names())
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (Vec::new(), false),
            names => names.map_err(|error| Refusal::of_file(&error, "rollouts"))?,
        };
        let step = |name: &String| {
            let number = name.strip_prefix("step-")?.strip_suffix(".jsonl")?;
            number.parse::<u64>().ok()
        };
        let mut steps: Vec<u64> = names.0.iter().filter_map(step).collect();
        steps.sort_unstable();
        Ok(json!({"steps": steps, "is_cut_off": names.1}))
    })
    .await
}

/// A stored step: its file and its index.
fn stored(app: &App, run: &Run, step: u64) -> Result<(std::fs::File, Arc<Index>), Refusal> {
    let name = format!("step-{step}.jsonl");
    let unreadable = |error: io::Error| Refusal::of_file(&error, &name);
    let folder = run.folder.folder("rollouts").map_err(unreadable)?;
    let mut file = folder.file(&name).map_err(unreadable)?;
    let index = app
        .indexes
        .of(&mut file, || run.config())
        .map_err(unreadable)?;
    Ok((file, index))
}

/// Which episodes of a step, and from which on.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Page {
    from: usize,
    limit: Option<usize>,
    ending: Option<String>,
    task: Option<String>,
    min_reward: Option<f64>,
    max_reward: Option<f64>,
}

impl Page {
    fn shows(&self, entry: &Entry) -> bool {
        let reward = entry.head.reward;
        let ending = self.ending.as_ref().filter(|ending| !ending.is_empty());
        ending.is_none_or(|ending| *ending == entry.head.status.kind)
            && (self.task.as_ref()).is_none_or(|task| entry.head.task_id.contains(task.as_str()))
            && self
                .min_reward
                .is_none_or(|min| reward.is_some_and(|reward| reward >= min))
            && self
                .max_reward
                .is_none_or(|max| reward.is_some_and(|reward| reward <= max))
    }
}

pub(super) async fn episodes(
    State(app): Shared,
    Path((name, step)): Path<(String, u64)>,
    Query(page): Query<Page>,
) -> Answer {
    reading(app, move |app| {
        let run = app.config.runs.get(&name)?;
        let (_, index) = stored(app, &run, step)?;
        let found: Vec<&Entry> = index
            .entries
            .iter()
            .filter(|entry| page.shows(entry))
            .collect();
        let limit = page.limit.unwrap_or(50).clamp(1, MAX_PAGE);
        let shown: Vec<&Entry> = found.iter().copied().skip(page.from).take(limit).collect();
        Ok(json!({
            "episodes": shown,
            "matching": found.len(),
            "total": index.entries.len(),
            "broken": index.broken,
            "is_incomplete": index.is_incomplete,
            "no_advantages": index.no_advantages,
        }))
    })
    .await
}

/// From which token on.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FromToken {
    tokens_from: usize,
}

pub(super) async fn episode(
    State(app): Shared,
    Path((name, step, row)): Path<(String, u64, usize)>,
    Query(from): Query<FromToken>,
) -> Answer {
    reading(app, move |app| {
        let run = app.config.runs.get(&name)?;
        let (line, index) = row_of(app, &run, step, row)?;
        let entry = index.entry(row).ok_or_else(|| no_row(step, row))?;
        let episode: Trajectory =
            serde_json::from_slice(&line).map_err(|error| Refusal::Unreadable {
                file: format!("step-{step}.jsonl"),
                reason: format!("row {row} is no episode: {error}"),
            })?;
        let own = view::tokenizer(&run);
        let tokenizer = own.as_ref().or(app.config.tokenizer.as_ref());
        let shown = view::shown(&index, entry, step, episode, tokenizer, from.tokens_from);
        Ok(json!(shown))
    })
    .await
}

fn no_row(step: u64, row: usize) -> Refusal {
    Refusal::NotFound {
        what: format!("episode {row} of step {step}"),
    }
}

fn row_of(app: &App, run: &Run, step: u64, row: usize) -> Result<(Vec<u8>, Arc<Index>), Refusal> {
    let (mut file, index) = stored(app, run, step)?;
    let entry = index.entry(row).ok_or_else(|| no_row(step, row))?;
    let line = entry.read(&mut file);
    let line = line.map_err(|error| Refusal::of_file(&error, "the step's file"))?;
    Ok((line, index))
}

/// The row as it is stored, to keep.
pub(super) async fn raw(
    State(app): Shared,
    Path((name, step, row)): Path<(String, u64, usize)>,
) -> Answer {
    let file = format!("attachment; filename=\"episode-{step}-{row}.json\"");
    let mut answer = reading(app, move |app| {
        let run = app.config.runs.get(&name)?;
        let (line, _) = row_of(app, &run, step, row)?;
        serde_json::from_slice::<Value>(&line).map_err(|error| Refusal::Unreadable {
            file: format!("step-{step}.jsonl"),
            reason: error.to_string(),
        })
    })
    .await?;
    if let Ok(value) = file.parse() {
        answer
            .headers_mut()
            .insert(header::CONTENT_DISPOSITION, value);
    }
    Ok(answer)
}
