use serde_json::json;

use super::*;

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => panic!("{other}"),
    }
}

fn read(api: Api, body: Value) -> (Value, Box<dyn Dialect>) {
    let asked = api
        .read(object(body))
        .unwrap_or_else(|error| panic!("{error}"));
    (Value::Object(asked.body), asked.dialect)
}

fn refusal(api: Api, body: Value) -> String {
    match api.read(object(body)) {
        Err(error) => error.to_string(),
        Ok(asked) => panic!("{:?}", asked.body),
    }
}

/// An answer that thinks, speaks and calls two tools.
fn answer() -> Answer {
    Answer {
        message: json!({
            "role": "assistant", "content": "I call.", "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        }),
        ending: Ending::ToolCalls,
        usage: Usage {
            prompt: 10,
            completion: 5,
            cached: 4,
        },
        tokens: None,
        logprobs: Value::Null,
    }
}

/// The events of an answer that came in pieces.
fn streamed(dialect: &mut dyn Dialect, answer: &Answer) -> Vec<Value> {
    let mut events = dialect.begin();
    for (reasoning, content) in [("h", ""), ("m", "I c"), ("", "all.")] {
        events.extend(dialect.more(&Delta {
            reasoning: reasoning.to_owned(),
            content: content.to_owned(),
        }));
    }
    events.extend(dialect.end(answer));
    let data = events.iter().filter(|event| event.data != "[DONE]");
    data.map(|event| {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        if let Some(name) = event.name {
            assert_eq!(data["type"], name);
        }
        data
    })
    .collect()
}

#[test]
fn a_chat_keeps_its_calls() {
    let body = json!({"model": "m", "messages": [], "stream": true});
    let (_, mut dialect) = read(Api::Chat, body);
    let whole = dialect.whole(&answer());
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(whole["choices"][0]["message"], answer().message);
    let chunks = streamed(dialect.as_mut(), &answer());
    let last = &chunks[chunks.len() - 1]["choices"][0];
    assert_eq!(last["finish_reason"], "tool_calls");
    let calls = &chunks[chunks.len() - 2]["choices"][0]["delta"]["tool_calls"];
    assert_eq!(calls[1]["index"], 1);
    assert_eq!(calls[0]["function"]["arguments"], "{\"x\":1}");
}

#[test]
fn a_message_of_anthropics_has_a_block_for_each_part() {
    let (_, mut dialect) = read(Api::Messages, json!({"model": "m", "messages": []}));
    let whole = dialect.whole(&answer());
    assert_eq!(
        whole["content"],
        json!([
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I call."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ])
    );
    assert_eq!(whole["stop_reason"], "tool_use");
    assert_eq!(whole["usage"]["input_tokens"], 6);
    assert_eq!(whole["usage"]["cache_read_input_tokens"], 4);
    let events = streamed(dialect.as_mut(), &answer());
    // Blocks are opened, told and closed one after another.
    let mut blocks: Vec<Value> = Vec::new();
    let mut is_open = false;
    for event in &events {
        let index = usize::try_from(event["index"].as_u64().unwrap_or(0)).unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!is_open && index == blocks.len());
                is_open = true;
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(is_open && index == blocks.len() - 1);
                let block = &mut blocks[index];
                for (delta, part) in [("text", "text"), ("thinking", "thinking")] {
                    if let Some(new) = event["delta"][delta].as_str() {
                        let text = format!("{}{new}", block[part].as_str().unwrap());
                        block[part] = Value::from(text);
                    }
                }
                if let Some(input) = event["delta"]["partial_json"].as_str() {
                    block["input"] = serde_json::from_str(input).unwrap();
                }
            }
            "content_block_stop" => is_open = false,
            _ => assert!(!is_open),
        }
    }
    assert_eq!(Value::from(blocks), whole["content"]);
    let stop = |ending| {
        let (_, mut dialect) = read(Api::Messages, json!({"messages": []}));
        let whole = dialect.whole(&Answer { ending, ..answer() });
        (whole["stop_reason"].clone(), whole["stop_sequence"].clone())
    };
    let stopped = stop(Ending::StopText("###".to_owned()));
    assert_eq!(stopped, (json!("stop_sequence"), json!("###")));
    assert_eq!(stop(Ending::Length), (json!("max_tokens"), Value::Null));
    assert_eq!(stop(Ending::Stop), (json!("end_turn"), Value::Null));
}

#[test]
fn a_request_of_anthropics_is_one_of_chat_completions() {
    let (chat, _) = read(
        Api::Messages,
        json!({
            "model": "m", "max_tokens": 9, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
            "system": "be", "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "s", "is_error": true},
                    {"type": "text", "text": "d"}, {"type": "text", "text": "e"},
                ]},
            ],
        }),
    );
    assert_eq!(
        chat,
        json!({
            "messages": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}},
                ]},
                {"role": "tool", "tool_call_id": "c1", "content": "r"},
                {"role": "tool", "tool_call_id": "c2", "content": "s"},
                {"role": "user", "content": [
                    {"type": "text", "text": "d"}, {"type": "text", "text": "e"},
                ]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "required",
            "chat_template_kwargs": {"enable_thinking": true},
            "model": "m", "max_tokens": 9, "stop": ["x"],
        })
    );
    for (body, words) in [
        (json!({}), "must be a list"),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            "`role`",
        ),
        (
            json!({"messages": [{"role": "user", "content": 1}]}),
            "`content`",
        ),
        (json!({"messages": [7]}), "message 0"),
        (json!({"messages": [], "system": 1}), "`system`"),
        (json!({"messages": [], "tools": 1}), "`tools`"),
    ] {
        let refused = refusal(Api::Messages, body);
        assert!(refused.contains(words), "{refused}");
    }
}

#[test]
fn a_response_has_an_item_for_each_part() {
    let body = json!({"model": "m", "input": "x", "metadata": {"k": "v"}});
    let (_, mut dialect) = read(Api::Responses, body.clone());
    let whole = dialect.whole(&answer());
    assert_eq!(whole["status"], "completed");
    assert_eq!(whole["metadata"], json!({"k": "v"}));
    let output = whole["output"].as_array().unwrap();
    let kinds: Vec<&str> = output
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["reasoning", "message", "function_call", "function_call"]
    );
    assert_eq!(output[1]["content"][0]["text"], "I call.");
    assert_eq!(output[2]["call_id"], "c1");
    let (_, mut dialect) = read(Api::Responses, body);
    let events = streamed(dialect.as_mut(), &answer());
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let done: Vec<&Value> = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| &event["item"])
        .collect();
    let last = &events[events.len() - 1]["response"];
    let without_id = |item: &Value| {
        let mut item = item.clone();
        item["id"].take();
        item
    };
    assert_eq!(
        done,
        last["output"]
            .as_array()
            .unwrap()
            .iter()
            .collect::<Vec<_>>()
    );
    assert_eq!(
        done.into_iter().map(without_id).collect::<Vec<_>>(),
        output.iter().map(without_id).collect::<Vec<_>>()
    );
}

/// What an answer was told as comes back as one message: no agent has to know how it was sampled.
#[test]
fn an_answer_that_is_sent_back_is_the_message_that_it_was() {
    let (_, mut dialect) = read(Api::Responses, json!({"input": "x"}));
    let mut input = vec![json!({"role": "user", "content": "x"})];
    input.extend(
        dialect.whole(&answer())["output"]
            .as_array()
            .unwrap()
            .clone(),
    );
    input.push(json!({"type": "function_call_output", "call_id": "c1", "output": "r"}));
    input.push(
        json!({"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "s"},
        ]}),
    );
    let (chat, _) = read(
        Api::Responses,
        json!({
            "input": input, "instructions": "be",
            "tools": [{"type": "function", "name": "f", "strict": true}, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        }),
    );
    assert_eq!(
        chat["messages"],
        json!([
            {"role": "system", "content": "be"},
            {"role": "user", "content": "x"},
            answer().message,
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
            {"role": "tool", "tool_call_id": "c2", "content": "s"},
        ])
    );
    assert_eq!(
        chat["tools"],
        json!([{"type": "function", "function": {"name": "f", "strict": true}}])
    );
    assert_eq!(chat["tool_choice"]["function"]["name"], "f");
    assert_eq!(chat["response_format"]["json_schema"]["name"], "n");
    // Two answers one after another stay two.
    let (chat, _) = read(
        Api::Responses,
        json!({"input": [
            {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ], "text": "x"}),
    );
    assert_eq!(chat["messages"].as_array().unwrap().len(), 2);
    assert_eq!(chat["messages"][1]["content"], "b");
    assert_eq!(chat["messages"][1]["tool_calls"][0]["id"], "c");
}

#[test]
fn an_error_has_the_shape_of_its_api() {
    let error = ProxyError::upstream("it is down");
    assert_eq!(
        Api::Messages.error(&error),
        json!({"type": "error", "error": {
            "type": "api_error", "message": "the upstream failed: it is down",
        }})
    );
    assert_eq!(
        Api::Chat.error(&error),
        json!({"error": {
            "message": "the upstream failed: it is down", "type": "server_error", "param": null,
            "code": "upstream_failed",
        }})
    );
    let event = Api::Messages.error_event(&error).to_bytes();
    assert!(event.starts_with(b"event: error\ndata: {"));
}
