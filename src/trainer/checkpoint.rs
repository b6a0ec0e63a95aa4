//! Saving and resuming: `checkpoints/step-N/`.
//!
//! A checkpoint folder holds the weights (`model.safetensors` and `config.json`, or an adapter that PEFT
//! loads), the optimizer's moments (`optimizer.safetensors`), PPO's value head
//! (`value_head.safetensors`) and `state.json`. It is written under another name, flushed to disk and renamed, so that a folder with the right name is complete.

use std::collections::HashMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TrainerError;
use super::optim::AdamW;
use super::value::ValueHead;
use crate::engine::model::{
    Decoder, LoraAdapter, load_weights, read_safetensors, write_safetensors,
};

const PARTIAL: &str = ".partial-";
const FOLDER: &str = "checkpoints";
const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const FORMAT: u32 = 1;

/// Where a run stands: what its next step needs besides weights and moments.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Steps done.
    pub step: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Whatever else the step loop wants back: its place in the data, counters.
    pub extra: Value,
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    format: u32,
    is_adapter: bool,
    optimizer_steps: usize,
    #[serde(flatten)]
    state: TrainState,
}

fn io_error(path: &Path, source: std::io::Error) -> TrainerError {
    TrainerError::Io {
        path: path.to_owned(),
        source,
    }
}

/// Writes `run/checkpoints/step-N` and returns its path. One that exists is replaced. `beside` adds
/// files of the caller's to the folder before it appears.
///
/// # Errors
///
/// Fails if a file cannot be written; no folder `step-N` is then left behind half written.
pub fn save_checkpoint<E: From<TrainerError>>(
    run: &Path,
    decoder: &Decoder,
    optimizer: &AdamW,
    critic: Option<&ValueHead>,
    state: &TrainState,
    base_model: Option<&str>,
    beside: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<PathBuf, E> {
    let folder = run.join(FOLDER);
    fs::create_dir_all(&folder).map_err(|source| io_error(&folder, source))?;
    let partial = tempfile::Builder::new()
        .prefix(PARTIAL)
        .permissions(Permissions::from_mode(0o777)) // less the umask
        .tempdir_in(&folder)
        .map_err(|source| io_error(&folder, source))?;
    write_state(
        partial.path(),
        decoder,
        optimizer,
        critic,
        state,
        base_model,
    )?;
    beside(partial.path())?;
    flush(partial.path())?;
    let target = checkpoint_path(run, state.step);
    put_in_place(partial.path(), &target).map_err(|source| io_error(&target, source))?;
    flush(&folder)?;
    Ok(target)
}

/// Moves a folder to where another may stand, which is then where it was: at no moment is there neither.
fn put_in_place(made: &Path, target: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    if !target.exists() {
        return fs::rename(made, target);
    }
    match renameat_with(CWD, made, CWD, target, RenameFlags::EXCHANGE) {
        // File systems that cannot, as some over a network.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            fs::remove_dir_all(target)?;
            fs::rename(made, target)
        }
        exchanged => Ok(exchanged?),
    }
}

/// Writes the files of a checkpoint.
fn write_state(
    path: &Path,
    decoder: &Decoder,
    optimizer: &AdamW,
    critic: Option<&ValueHead>,
    state: &TrainState,
    base_model: Option<&str>,
) -> Result<(), TrainerError> {
    let adapter = decoder.adapter(base_model);
    match &adapter {
        Some(adapter) => adapter.save(path)?,
        None => decoder.save(path)?,
    }
    write_safetensors(&path.join(OPTIMIZER), &optimizer.state()?)?;
    if let Some(critic) = critic {
        critic.save(path)?;
    }
    let file = StateFile {
        format: FORMAT,
        is_adapter: adapter.is_some(),
        optimizer_steps: optimizer.steps(),
        state: state.clone(),
    };
    let text = serde_json::to_string_pretty(&file).map_err(|source| TrainerError::Json {
        path: path.join(STATE),
        source,
    })?;
    fs::write(path.join(STATE), text).map_err(|source| io_error(path, source))
}

/// Removes what saving left behind when the process was killed in the middle of it.
///
/// # Errors
///
/// Fails if the folder cannot be read or something cannot be removed.
pub fn remove_partial_checkpoints(run: &Path) -> Result<(), TrainerError> {
    let folder = run.join(FOLDER);
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(&folder).map_err(|source| io_error(&folder, source))? {
        let path = entry.map_err(|source| io_error(&folder, source))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if name.is_some_and(|name| name.starts_with(PARTIAL)) {
            fs::remove_dir_all(&path).map_err(|source| io_error(&path, source))?;
        }
    }
    Ok(())
}

/// Removes all but the `keep` newest checkpoints of a run.
///
/// # Errors
///
/// Fails if the folder cannot be read or a checkpoint cannot be removed.
pub fn prune_checkpoints(run: &Path, keep: usize) -> Result<(), TrainerError> {
    let steps = checkpoint_steps(run)?;
    for step in &steps[..steps.len().saturating_sub(keep)] {
        let path = checkpoint_path(run, *step);
        fs::remove_dir_all(&path).map_err(|source| io_error(&path, source))?;
    }
    Ok(())
}

/// Flushes a folder's files and the folder itself to disk.
fn flush(folder: &Path) -> Result<(), TrainerError> {
    let entries = fs::read_dir(folder).map_err(|source| io_error(folder, source))?;
    for entry in entries {
        let path = entry.map_err(|source| io_error(folder, source))?.path();
        if path.is_file() {
            let file = fs::File::open(&path).map_err(|source| io_error(&path, source))?;
            file.sync_all().map_err(|source| io_error(&path, source))?;
        }
    }
    // Only Unix lets a folder be opened and flushed.
    if cfg!(unix) {
        let file = fs::File::open(folder).map_err(|source| io_error(folder, source))?;
        file.sync_all().map_err(|source| io_error(folder, source))?;
    }
    Ok(())
}

/// Returns the steps of the run's checkpoints, in order.
///
/// # Errors
///
/// Fails if the folder cannot be listed; a run without checkpoints has none.
pub fn checkpoint_steps(run: &Path) -> Result<Vec<usize>, TrainerError> {
    let folder = run.join(FOLDER);
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut steps = Vec::new();
    for entry in fs::read_dir(&folder).map_err(|source| io_error(&folder, source))? {
        let entry = entry.map_err(|source| io_error(&folder, source))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step-"));
        steps.extend(step.and_then(|step| step.parse::<usize>().ok()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Returns the folder of a run's checkpoint after `step` steps.
#[must_use]
pub fn checkpoint_path(run: &Path, step: usize) -> PathBuf {
    run.join(FOLDER).join(format!("step-{step}"))
}

/// Returns the folder of the run's latest checkpoint, if it has one.
///
/// # Errors
///
/// Fails if the folder cannot be listed.
pub fn latest_checkpoint(run: &Path) -> Result<Option<PathBuf>, TrainerError> {
    let step = checkpoint_steps(run)?.pop();
    Ok(step.map(|step| checkpoint_path(run, step)))
}

/// Sets the decoder's variables, the optimizer's moments and the value head, if there is one, from a checkpoint folder.
///
/// # Errors
///
/// Fails if a file is missing or damaged, or if the checkpoint belongs to another kind of run: an
/// adapter where all weights are trained, or the reverse.
pub fn load_checkpoint(
    path: &Path,
    decoder: &Decoder,
    optimizer: &mut AdamW,
    critic: Option<&mut ValueHead>,
) -> Result<TrainState, TrainerError> {
    let state_path = path.join(STATE);
    let text = fs::read_to_string(&state_path).map_err(|source| io_error(&state_path, source))?;
    let file: StateFile = serde_json::from_str(&text).map_err(|source| TrainerError::Json {
        path: state_path,
        source,
    })?;
    let mismatch = |reason: String| TrainerError::CheckpointMismatch {
        path: path.to_owned(),
        reason,
    };
    if file.format != FORMAT {
        return Err(mismatch(format!(
            "format {}, this version reads {FORMAT}",
            file.format
        )));
    }
    if file.is_adapter != decoder.lora().is_some() {
        let (found, wanted) = if file.is_adapter {
            ("an adapter", "all weights")
        } else {
            ("all weights", "an adapter")
        };
        return Err(mismatch(format!(
            "it holds {found}, the run trains {wanted}"
        )));
    }
    let wide = if decoder.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let moments: HashMap<_, _> = read_safetensors(&path.join(OPTIMIZER), wide, &Device::Cpu)?
        .into_iter()
        .collect();
    if file.is_adapter {
        decoder.load_adapter(&LoraAdapter::load(path, wide, &Device::Cpu)?)?;
    } else {
        decoder.set_variables(&load_weights(path, decoder.config(), wide, &Device::Cpu)?)?;
    }
    optimizer.restore(&moments, file.optimizer_steps)?;
    if let Some(critic) = critic {
        critic.load(path)?;
    }
    Ok(file.state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_is_made_again_stands_where_the_old_one_did() {
        let folder = tempfile::tempdir().unwrap();
        let (made, target) = (folder.path().join("made"), folder.path().join("step-1"));
        for (round, is_left) in [("first", false), ("second", true)] {
            fs::create_dir(&made).unwrap();
            fs::write(made.join("state"), round).unwrap();
            put_in_place(&made, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("state")).unwrap(), round);
            // What stood there is not lost before the new one is in its place.
            assert_eq!(made.join("state").exists(), is_left);
        }
        assert_eq!(fs::read_to_string(made.join("state")).unwrap(), "first");
    }
}
