//! What is asked and answered.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::error::Refusal;
use super::folder::MAX_NAMES;
use super::index::{Entry, Index};
use super::metrics::{Place, Rows, read_rows};
use super::runs::{Glance, Run};
use super::{App, assets, episode as view, prometheus};
use crate::http::metrics_page;
use crate::report::{CHARTS, INTERVALS};
use crate::run::LOAD;
use crate::trajectory::Trajectory;

type Shared = State<Arc<App>>;
type Answer = Result<Response, Refusal>;

/// The most bytes of a download that are held at a time.
const MAX_PART: u64 = 256 << 10;
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

/// Counts for everybody; numbers of runs for who has the key, where there is one.
pub(super) async fn counts(State(app): Shared, headers: HeaderMap) -> Answer {
    let mut text = String::new();
    app.responses.write(&mut text);
    if let Some(limit) = &app.rate_limit {
        limit.write(&mut text);
    }
    let key = app.config.api_key.as_ref();
    if key.is_some_and(|key| key.shown(&headers).is_none()) {
        return Ok(metrics_page(text));
    }
    let text = reading(&app, move |app| {
        prometheus::write(&mut text, app);
        Ok(text)
    });
    Ok(metrics_page(text.await?))
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
async fn reading<T: Send + 'static>(
    app: &Arc<App>,
    read: impl FnOnce(&App) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let permit = Arc::clone(&app.readers).acquire_owned().await;
    let permit = permit.map_err(internal)?;
    let app = Arc::clone(app);
    let work = move || {
        let found = read(&app);
        drop(permit);
        found
    };
    tokio::task::spawn_blocking(work).await.map_err(internal)?
}

fn internal(error: impl std::fmt::Display) -> Refusal {
    Refusal::Internal {
        reason: error.to_string(),
    }
}

fn written(found: &impl Serialize) -> Result<Vec<u8>, Refusal> {
    serde_json::to_vec(found).map_err(internal)
}

fn as_json(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Answers with what is read.
async fn answering(
    app: &Arc<App>,
    read: impl FnOnce(&App) -> Result<Vec<u8>, Refusal> + Send + 'static,
) -> Answer {
    Ok(as_json(reading(app, read).await?))
}

pub(super) async fn runs(State(app): Shared) -> Answer {
    #[derive(Serialize)]
    struct Found {
        runs: Vec<Glance>,
        is_cut_off: bool,
    }

    answering(&app, |app| {
        let found = app.config.runs.all();
        let (runs, is_cut_off) =
            found.map_err(|error| Refusal::of_file(&error, "the folder of runs"))?;
        let runs = runs.iter().map(|run| run.glance(&app.glances)).collect();
        written(&Found { runs, is_cut_off })
    })
    .await
}

pub(super) async fn run(State(app): Shared, Path(name): Path<String>) -> Answer {
    answering(&app, move |app| {
        let run = app.config.runs.get(&name)?;
        let glance = run.glance(&app.glances);
        written(&json!({"run": glance, "run_toml": run.run_toml()}))
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
    rows(&app, name, "metrics.jsonl", from).await
}

/// What the run took of its machine.
pub(super) async fn load(
    State(app): Shared,
    Path(name): Path<String>,
    Query(from): Query<From>,
) -> Answer {
    rows(&app, name, LOAD, from).await
}

async fn rows(app: &Arc<App>, name: String, file: &'static str, from: From) -> Answer {
    answering(app, move |app| {
        let run = app.config.runs.get(&name)?;
        let place = Place {
            file: from.file,
            offset: from.offset,
        };
        let mut opened = match run.folder.file(file) {
            // A run before its first step.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Rows::none().json().map_err(internal);
            }
            opened => opened.map_err(|error| Refusal::of_file(&error, file))?,
        };
        let rows = read_rows(&mut opened, place, from.every);
        let rows = rows.map_err(|error| Refusal::of_file(&error, file))?;
        rows.json().map_err(internal)
    })
    .await
}

pub(super) async fn steps(State(app): Shared, Path(name): Path<String>) -> Answer {
    answering(&app, move |app| {
        let run = app.config.runs.get(&name)?;
        let step = |name: &str| {
            let number = name.strip_prefix("step-")?.strip_suffix(".jsonl")?;
            number.parse::<u64>().ok()
        };
        let found = (run.folder.folder("rollouts")).and_then(|all| all.largest(MAX_NAMES, step));
        let (names, is_cut_off) = match found {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (Vec::new(), false),
            found => found.map_err(|error| Refusal::of_file(&error, "rollouts"))?,
        };
        let steps: Vec<u64> = names.into_iter().map(|(step, _)| step).collect();
        written(&json!({"steps": steps, "is_cut_off": is_cut_off}))
    })
    .await
}

/// A stored step: its file and its index.
fn stored(app: &App, run: &Run, step: u64) -> Result<(std::fs::File, Arc<Index>), Refusal> {
    let name = format!("step-{step}.jsonl");
    let unreadable = |error: io::Error| Refusal::of_file(&error, &name);
    let folder = run.folder.folder("rollouts").map_err(unreadable)?;
    let mut file = folder.file(&name).map_err(unreadable)?;
    let config = || match step < run.settings_since() {
        true => Err("the run went on with other settings of `[trainer]` since"),
        false => (run.config()).ok_or("this version does not know all settings of the run"),
    };
    let index = app.indexes.of(&mut file, config).map_err(unreadable)?;
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
        let reward = entry.reward;
        let ending = self.ending.as_ref().filter(|ending| !ending.is_empty());
        ending.is_none_or(|ending| *ending == entry.status.kind)
            && (self.task.as_ref()).is_none_or(|task| entry.task_id.contains(task.as_str()))
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
    answering(&app, move |app| {
        let run = app.config.runs.get(&name)?;
        let (_, index) = stored(app, &run, step)?;
        let found: Vec<&Entry> = index
            .entries
            .iter()
            .filter(|entry| page.shows(entry))
            .collect();
        let limit = page.limit.unwrap_or(50).clamp(1, MAX_PAGE);
        let shown: Vec<&Entry> = found.iter().copied().skip(page.from).take(limit).collect();
        written(&json!({
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
    answering(&app, move |app| {
        let run = app.config.runs.get(&name)?;
        let (line, index) = row_of(app, &run, step, row)?;
        let entry = index.entry(row).ok_or_else(|| no_row(step, row))?;
        let episode: Trajectory =
            serde_json::from_slice(&line).map_err(|error| Refusal::Unreadable {
                file: format!("step-{step}.jsonl"),
                reason: format!("row {row} is no episode: {error}"),
            })?;
        drop(line);
        let given = app.config.tokenizer.clone();
        let tokenizer = given.or_else(|| app.tokenizers.of(&run));
        let tokenizer = tokenizer.as_ref();
        let shown = view::shown(&index, entry, step, episode, tokenizer, from.tokens_from);
        written(&shown)
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

/// The row as it is stored, to keep. It goes out as it is read.
pub(super) async fn raw(
    State(app): Shared,
    Path((name, step, row)): Path<(String, u64, usize)>,
) -> Answer {
    let attachment = format!("attachment; filename=\"episode-{step}-{row}.json\"");
    let (file, length) = reading(&app, move |app| {
        let run = app.config.runs.get(&name)?;
        let (mut file, index) = stored(app, &run, step)?;
        let entry = index.entry(row).ok_or_else(|| no_row(step, row))?;
        let (offset, length) = entry.place();
        let found = file.seek(SeekFrom::Start(offset));
        found.map_err(|error| Refusal::of_file(&error, "the step's file"))?;
        Ok((file, length))
    })
    .await?;
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
        (header::CONTENT_DISPOSITION, attachment),
    ];
    let parts = stream::try_unfold((file, length), async |(mut file, left)| {
        if left == 0 {
            return Ok(None);
        }
        let read = move || {
            let mut part = Vec::new();
            let read = (&mut file)
                .take(left.min(MAX_PART))
                .read_to_end(&mut part)? as u64;
            match read {
                0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                read => Ok(Some((part, (file, left - read)))),
            }
        };
        tokio::task::spawn_blocking(read)
            .await
            .map_err(io::Error::other)?
    });
    Ok((headers, Body::from_stream(parts)).into_response())
}
