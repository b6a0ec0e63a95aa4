//! `wardian chat`: a conversation with a model in the terminal.

use std::io::{self, BufRead, IsTerminal as _, Read as _};
use std::sync::Arc;

use clap::Args;

use super::runtime::load_sandboxes;
use super::setup;
use crate::chat::{
    ChatTemplate, Message, ParsedTurn, RenderOptions, ToolCall, ToolCallFormat, ToolSpec,
    parse_turn_as,
};
use crate::cli::ExitStatus;
use crate::cli::args::ModelArgs;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::engine::{
    Engine, EngineConfig, EngineError, FinishReason, Finished, SamplingParams, SequenceId,
    SequenceSeed, TextStream, ThinkingBudget, Tokenizer,
};
use crate::env::{RUN_PYTHON, describe_outcome, is_submission, run_python_tool};
use crate::run::RunError;
use crate::sandbox::{ExecRequest, Limits, Sandbox};

/// Longest message read from standard input.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Arguments of `wardian chat`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Instructions that the conversation begins with
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Divides the logits; 0 takes the likeliest token each time
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.7,
        allow_negative_numbers = true
    )]
    temperature: f32,
    /// Most tokens of one turn [default: what the context has room for]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Seed of the tokens drawn and of the programs' randomness
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Do not let the model run Python
    #[arg(long)]
    no_tools: bool,
    /// Most programs in a row before you are asked again
    #[arg(long, value_name = "N", default_value_t = 8)]
    max_tool_calls: usize,
    /// Let the model reason first
    #[arg(long)]
    thinking: bool,
    /// Most tokens of reasoning in one turn [default: no limit]
    #[arg(long, value_name = "N")]
    thinking_budget: Option<usize>,
}

pub(in crate::cli) fn run(args: &ChatArgs, printer: &Printer) -> Outcome {
    let loaded = setup::load_model(&args.model)?;
    let policy = &loaded.policy;
    let tools = !args.no_tools && policy.knows_tools();
    let sandbox = match tools {
        true => Some(load_sandboxes(&loaded.config.sandbox, printer)?.tools),
        false => None,
    };
    let config = EngineConfig {
        max_running: 1,
        ..EngineConfig::default()
    };
    let engine = Engine::new(Arc::clone(&policy.decoder), config)
        .map_err(|error| Failure::from(RunError::from(error)))?;
    let thinking = args
        .thinking_budget
        .map(|tokens| ThinkingBudget::new(&policy.tokenizer, tokens))
        .transpose()
        .map_err(in_words_of_the_command)?;
    let params = SamplingParams {
        temperature: args.temperature,
        max_new_tokens: args.max_tokens.unwrap_or_else(|| engine.max_context()),
        stop_token_ids: policy.stop_token_ids.clone(),
        thinking,
        ..SamplingParams::default()
    };
    params.validate().map_err(in_words_of_the_command)?;
    let mut chat = Chat {
        engine,
        tokenizer: &policy.tokenizer,
        template: &policy.template,
        format: ToolCallFormat::detect(policy.template.source()),
        options: RenderOptions {
            enable_thinking: Some(args.thinking),
            ..RenderOptions::prompt()
        },
        params,
        seed: args.seed,
        turns: 0,
        system: args.system.clone(),
        messages: Vec::new(),
        tools: sandbox
            .is_some()
            .then(run_python_tool)
            .into_iter()
            .collect(),
        sandbox,
        max_tool_calls: args.max_tool_calls,
        limits: Limits::default(),
        printer,
    };
    chat.reset();
    let mut input = io::stdin().lock();
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        printer.note(&format!(
            "Talking to `{}`; `/reset` begins anew, `/exit` or Ctrl-D ends",
            loaded.name
        ));
    }
    while let Some(line) = read_line(&mut input, is_terminal).map_err(Failure::usage)? {
        match line.trim() {
            "" => {}
            "/exit" => break,
            "/reset" => {
                chat.reset();
                printer.note("The conversation begins anew");
            }
            text if text.starts_with('/') => {
                printer.error(&format!(
                    "there is no `{text}`; there are `/reset` and `/exit`"
                ));
            }
            text => chat.say(text)?,
        }
    }
    Ok(ExitStatus::Success)
}

/// Names the option where the engine names the parameter that it sets.
fn in_words_of_the_command(error: EngineError) -> Failure {
    match error {
        EngineError::InvalidSampling { field, reason } => {
            let option = match field {
                "max_new_tokens" => "--max-tokens",
                "thinking" => "--thinking-budget",
                "temperature" => "--temperature",
                other => other,
            };
            Failure::usage(anyhow::anyhow!("invalid `{option}`: {reason}"))
        }
        error => Failure::usage(error),
    }
}

/// Reads the next message; `None` at the end of the input.
fn read_line(input: &mut impl BufRead, is_terminal: bool) -> anyhow::Result<Option<String>> {
    if is_terminal {
        use io::Write as _;
        let mut err = anstream::stderr().lock();
        write!(err, "\x1b[1m>\x1b[0m ")?;
        err.flush()?;
    }
    let mut line = Vec::new();
    let read = input
        .take(MAX_LINE_BYTES + 1)
        .read_until(b'\n', &mut line)?;
    anyhow::ensure!(
        read as u64 <= MAX_LINE_BYTES,
        "a message is longer than {MAX_LINE_BYTES} bytes"
    );
    if read == 0 {
        return Ok(None);
    }
    // A model reads text: what is none is shown to it as such, and the conversation goes on.
    Ok(Some(String::from_utf8_lossy(&line).into_owned()))
}

struct Chat<'a> {
    engine: Engine,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    format: ToolCallFormat,
    options: RenderOptions,
    params: SamplingParams,
    seed: u64,
    /// Answers so far, each of which draws from a stream of its own.
    turns: u64,
    system: Option<String>,
    messages: Vec<Message>,
    tools: Vec<ToolSpec>,
    sandbox: Option<Arc<dyn Sandbox>>,
    max_tool_calls: usize,
    limits: Limits,
    printer: &'a Printer,
}

impl Chat<'_> {
    fn reset(&mut self) {
        self.messages = self.system.iter().cloned().map(Message::system).collect();
        self.turns = 0;
    }

    /// Answers one message. A conversation that cannot go on is told and stays as it was.
    fn say(&mut self, text: &str) -> Result<(), Failure> {
        let before = self.messages.len();
        self.messages.push(Message::user(text));
        let begun = self.begin();
        let id = match begun {
            Ok(id) => id,
            Err(error) => {
                self.messages.truncate(before);
                if matches!(error, RunError::Engine(EngineError::PromptTooLong { .. })) {
                    self.printer.error(&error.to_string());
                    self.printer
                        .note("hint: `/reset` begins a new conversation");
                    return Ok(());
                }
                return Err(error.into());
            }
        };
        let answered = self.answer(id);
        self.engine.release(id).map_err(Failure::internal)?;
        answered
    }

    /// Renders the conversation and adds it to the engine, which knows most of it from before.
    fn begin(&mut self) -> Result<SequenceId, RunError> {
        let chat = self
            .template
            .render(&self.messages, &self.tools, &self.options)?;
        let prompt = self.tokenizer.encode_chat(&chat.text, &chat.literal)?;
        let seed = SequenceSeed::new(self.seed, 0, self.turns);
        self.turns += 1;
        Ok(self.engine.add(prompt, self.params.clone(), seed)?)
    }

    /// Samples turns, with the tool results between them appended as in training.
    fn answer(&mut self, id: SequenceId) -> Result<(), Failure> {
        let internal = |error: EngineError| Failure::from(RunError::from(error));
        let mut made: Vec<ToolCall> = Vec::new();
        let mut calls = 0;
        loop {
            let finished = self.sample(id)?;
            let text = finished.text(self.tokenizer).map_err(internal)?;
            let parsed = match self.tools.is_empty() {
                true => ParsedTurn {
                    content: text,
                    ..ParsedTurn::default()
                },
                false => parse_turn_as(&text, self.format, &self.tools),
            };
            self.messages.push(Message {
                reasoning_content: parsed.reasoning,
                tool_calls: parsed.tool_calls.iter().flatten().cloned().collect(),
                ..Message::assistant(parsed.content)
            });
            if finished.finish_reason == FinishReason::Length {
                self.printer
                    .note("The turn was cut off: its tokens or the context are used up");
                return Ok(());
            }
            if parsed.tool_calls.is_empty() {
                return Ok(());
            }
            let read = || parsed.tool_calls.iter().flatten();
            let is_over = read().any(|call| is_submission(&call.name));
            // What was answered before is answered the same again.
            let is_stuck = parsed.tool_calls.iter().all(|call| match call {
                Ok(call) => made.contains(call),
                Err(_) => false,
            });
            made.extend(read().cloned());
            let mut results = Vec::with_capacity(parsed.tool_calls.len());
            for call in &parsed.tool_calls {
                calls += 1;
                let result = match call {
                    Ok(call) if is_submission(&call.name) => {
                        Message::tool_result(call, "Submitted. Nothing is graded here.")
                    }
                    Ok(call) => Message::tool_result(call, self.call(call)?),
                    Err(error) => Message::tool(format!("error: {error}")),
                };
                self.printer
                    .note(&format!("\x1b[2m{}\x1b[0m", result.content.trim_end()));
                results.push(result);
            }
            self.messages.extend(results.iter().cloned());
            if is_over {
                return Ok(());
            }
            if is_stuck {
                self.printer
                    .note("The model repeats a call that was answered: it is your turn");
                return Ok(());
            }
            if calls >= self.max_tool_calls {
                self.printer
                    .note("The model has called its tool often enough for one answer");
                return Ok(());
            }
            let end_of_turn = self.tokenizer.eos_token().unwrap_or_default();
            let suffix = self
                .template
                .tool_suffix(&results, &self.tools, end_of_turn, &self.options)
                .map_err(|error| Failure::from(RunError::from(error)))?;
            let suffix = self
                .tokenizer
                .encode_chat(&suffix.text, &suffix.literal)
                .map_err(internal)?;
            self.engine.extend(id, &suffix).map_err(internal)?;
        }
    }

    /// Samples one turn and prints its text as it comes.
    fn sample(&mut self, id: SequenceId) -> Result<Finished, Failure> {
        let internal = |error: EngineError| Failure::from(RunError::from(error));
        let mut text = TextStream::new(self.tokenizer, &[]);
        let mut told = 0;
        loop {
            let finished = self.engine.step().map_err(internal)?.pop();
            let tokens = match &finished {
                Some(finished) => &finished.tokens,
                None => self.engine.turn(id).map_err(internal)?.tokens,
            };
            for &token in &tokens[told..] {
                if !self.params.stop_token_ids.contains(&token) {
                    let (piece, _) = text.push(token).map_err(internal)?;
                    self.print(&piece)?;
                }
            }
            told = tokens.len();
            if let Some(finished) = finished {
                let rest = text.finish().map_err(internal)?;
                self.print(&format!("{rest}\n"))?;
                return Ok(finished);
            }
        }
    }

    fn print(&self, text: &str) -> Result<(), Failure> {
        self.printer.raw(text.as_bytes()).map_err(Failure::internal)
    }

    /// Runs the call's program; what the model did wrong is a result, too.
    fn call(&self, call: &ToolCall) -> Result<String, Failure> {
        let Some(sandbox) = &self.sandbox else {
            return Ok("error: there are no tools".to_owned());
        };
        if call.name != RUN_PYTHON {
            return Ok(format!(
                "error: there is no tool `{}`; use `{RUN_PYTHON}`",
                call.name
            ));
        }
        let Some(code) = call.arguments.get("code").and_then(|code| code.as_str()) else {
            return Ok(format!(
                "error: `{RUN_PYTHON}` needs the argument `code`, a string"
            ));
        };
        let request = ExecRequest {
            code: code.to_owned(),
            seed: Some(self.seed),
            ..ExecRequest::default()
        };
        let outcome = sandbox
            .exec(&request, &self.limits)
            .map_err(Failure::internal)?;
        Ok(describe_outcome(&outcome, MAX_OUTPUT_CHARS))
    }
}

/// Characters of a program's output that the model is shown, as in training.
const MAX_OUTPUT_CHARS: usize = 4096;
