//! Answers measurement requests, one JSON object a line, so that `scripts/compare/sandbox.py` can
//! measure this sandbox in turn with others.
//!
//! `scripts/compare/worker.py` describes the requests; this is Wardian's side of them. Times are
//! of single calls, in microseconds.

use std::io::{self, BufRead as _, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wardian::sandbox::{
    ExecOutcome, ExecRequest, Limits, RuntimeOptions, SandboxError, Session, WasmRuntime,
};

/// Long enough for any program of the comparison: its driver gives up earlier.
const DEADLINE: Duration = Duration::from_secs(300);
/// More than any program of the comparison counts.
const FUEL: u64 = 1 << 60;

#[derive(Deserialize)]
#[serde(tag = "what", rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Describe,
    Fresh {
        code: String,
        count: usize,
        /// Seconds between runs, which are not timed.
        pause: f64,
    },
    Throughput {
        code: String,
        workers: usize,
        seconds: f64,
    },
    Open {
        sessions: usize,
        code: String,
    },
    Step {
        code: String,
        count: usize,
    },
    Fork {
        code: String,
        probe: String,
        count: usize,
    },
    Close,
}

/// The times of some runs, and how the last ended.
#[derive(Serialize)]
struct Timed {
    micros: Vec<f64>,
    ok: bool,
    stdout: String,
    error: String,
}

struct Measure {
    runtime: WasmRuntime,
    limits: Limits,
    sessions: Vec<Session>,
}

/// Answers requests from standard input until it ends.
pub(crate) fn serve() -> io::Result<()> {
    let runtime = WasmRuntime::load(&RuntimeOptions::default(), |progress| {
        // Standard output is for answers.
        drop(writeln!(io::stderr(), "{progress}"));
    })
    .map_err(io::Error::other)?;
    let mut measure = Measure {
        runtime,
        limits: Limits {
            fuel: FUEL,
            deadline: DEADLINE,
            ..Limits::default()
        },
        sessions: Vec::new(),
    };
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?) {
            Ok(request) => measure
                .answer(request)
                .unwrap_or_else(|error| json!({"failed": error.to_string()})),
            Err(error) => json!({"failed": error.to_string()}),
        };
        writeln!(output, "{answer}")?;
        output.flush()?;
    }
    Ok(())
}

impl Measure {
    fn answer(&mut self, request: Request) -> Result<Value, SandboxError> {
        match request {
            Request::Describe => self.describe(),
            Request::Fresh { code, count, pause } => {
                let request = ExecRequest::new(code);
                let pause = Duration::from_secs_f64(pause);
                timed(count, pause, || self.runtime.exec(&request, &self.limits))
            }
            Request::Throughput {
                code,
                workers,
                seconds,
            } => self.throughput(&code, workers, Duration::from_secs_f64(seconds)),
            Request::Open { sessions, code } => self.open(sessions, &code),
            Request::Step { code, count } => {
                let Some(session) = self.sessions.last_mut() else {
                    return Ok(json!({"failed": "no session is open"}));
                };
                let request = ExecRequest::new(code);
                timed(count, Duration::ZERO, || session.step(&request))
            }
            Request::Fork { code, probe, count } => self.fork(&code, &probe, count),
            Request::Close => {
                self.sessions.clear();
                Ok(json!({}))
            }
        }
    }

    fn describe(&self) -> Result<Value, SandboxError> {
        let code = "import sys\nprint('.'.join(map(str, sys.version_info[:3])))";
        let outcome = self.runtime.exec(&ExecRequest::new(code), &self.limits)?;
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "python": outcome.stdout_text().trim(),
            "isolation": "WebAssembly",
            "fresh": "`WasmRuntime::exec`: a new instance, dropped before the call returns",
            "session": "a `Session`",
        }))
    }

    fn throughput(
        &self,
        code: &str,
        workers: usize,
        duration: Duration,
    ) -> Result<Value, SandboxError> {
        let request = ExecRequest::new(code);
        let started = Instant::now();
        let work = || {
            let mut runs = 0_u64;
            while started.elapsed() < duration {
                self.runtime.exec(&request, &self.limits)?;
                runs += 1;
            }
            Ok(runs)
        };
        let runs: u64 = thread::scope(|scope| {
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            workers
                .into_iter()
                .map(|worker| worker.join().expect("a worker does not panic"))
                .sum::<Result<u64, SandboxError>>()
        })?;
        Ok(json!({"runs": runs, "seconds": started.elapsed().as_secs_f64()}))
    }

    fn open(&mut self, sessions: usize, code: &str) -> Result<Value, SandboxError> {
        let request = ExecRequest::new(code);
        for _ in 0..sessions {
            let mut session = self.runtime.session(&self.limits)?;
            let outcome = session.step(&request)?;
            if !outcome.exit.is_success() {
                return Ok(json!({"failed": outcome.stderr_text()}));
            }
            self.sessions.push(session);
        }
        Ok(json!({"sessions": self.sessions.len()}))
    }

    /// Copies a live session and runs the copy's first step. The copy before is closed meanwhile,
    /// so that instances are used again, as they are in a search.
    fn fork(&self, code: &str, probe: &str, count: usize) -> Result<Value, SandboxError> {
        let mut parent = self.runtime.session(&self.limits)?;
        parent.step(&ExecRequest::new(code))?;
        let probe = ExecRequest::new(probe);
        let mut last = None;
        timed(count, Duration::ZERO, || {
            drop(last.take());
            let mut child = parent.fork(1)?.remove(0);
            let outcome = child.step(&probe);
            last = Some(child);
            outcome
        })
    }
}

fn timed(
    count: usize,
    pause: Duration,
    mut run: impl FnMut() -> Result<ExecOutcome, SandboxError>,
) -> Result<Value, SandboxError> {
    let mut micros = Vec::with_capacity(count);
    let mut last = None;
    for _ in 0..count {
        let started = Instant::now();
        let outcome = run()?;
        micros.push(started.elapsed().as_secs_f64() * 1e6);
        last = Some(outcome);
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
    let timed = Timed {
        micros,
        ok: last
            .as_ref()
            .is_none_or(|outcome| outcome.exit.is_success()),
        stdout: last
            .as_ref()
            .map(ExecOutcome::stdout_text)
            .unwrap_or_default(),
        error: last
            .as_ref()
            .filter(|outcome| !outcome.exit.is_success())
            .map(|outcome| format!("{}{}", outcome.stderr_text(), outcome.exit))
            .unwrap_or_default(),
    };
    Ok(json!(timed))
}
