//! Proves of a finished module that every cycle of its code pays.
//!
//! Shares no code with the rewriter: it knows a charge by its operators.

use std::collections::HashMap;

use wasmparser::{
    BlockType, ElementItems, ExternalKind, FuncType, Operator, Parser, Payload, TypeRef, ValType,
};

use super::{BULK_SHIFT, MARK, METER, REFILL, malformed, unmetered};
use crate::sandbox::error::SandboxError;

/// Checks a metered module.
///
/// # Errors
///
/// Returns [`SandboxError::Unmetered`] for the first thing that is not as the
/// [module](super) says.
pub(super) fn verify(wasm: &[u8]) -> Result<(), SandboxError> {
    let module = Facts::read(wasm)?;
    let mut functions = Vec::new();
    for payload in Parser::new(0).parse_all(wasm) {
        if let Payload::CodeSectionEntry(body) = payload.map_err(malformed)? {
            let operators = body.get_operators_reader().map_err(malformed)?;
            let operators: Vec<_> = operators
                .into_iter()
                .collect::<Result<_, _>>()
                .map_err(malformed)?;
            let number = functions.len();
            let function = module
                .check_body(&operators)
                .map_err(|reason| unmetered(format!("in function {number}: {reason}")))?;
            functions.push(function);
        }
    }
    module.check_calls(&functions)
}

/// What the code is checked against.
#[derive(Debug, Default)]
struct Facts {
    types: Vec<FuncType>,
    imports: u32,
    refill: u32,
    meter: u32,
    mark: u32,
    /// The type of each function with code.
    functions: Vec<u32>,
    /// Functions that an indirect call may reach.
    taken: Vec<u32>,
}

/// What a function's body says about calls.
#[derive(Debug, Default)]
struct Calls {
    pays_at_entry: bool,
    direct: Vec<u32>,
    /// Types.
    indirect: Vec<u32>,
    /// Functions whose address it takes.
    taken: Vec<u32>,
}

/// A stretch of inserted code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inserted {
    /// A charge of at least one unit.
    Charge,
    /// One that asks the host.
    Question,
    /// A charge for the length that it leaves on the stack.
    Bulk,
}

impl Facts {
    fn read(wasm: &[u8]) -> Result<Self, SandboxError> {
        let mut facts = Self::default();
        let mut refill = None;
        let mut mutable = Vec::new();
        let mut names = HashMap::new();
        for payload in Parser::new(0).parse_all(wasm) {
            match payload.map_err(malformed)? {
                Payload::TypeSection(section) => {
                    for ty in section.into_iter_err_on_gc_types() {
                        facts.types.push(ty.map_err(malformed)?);
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import.map_err(malformed)?;
                        if !matches!(import.ty, TypeRef::Func(_)) {
                            return Err(unmetered("it imports something that is not a function"));
                        }
                        if (import.module, import.name) == REFILL
                            && refill.replace(facts.imports).is_some()
                        {
                            return Err(unmetered("it imports the meter twice"));
                        }
                        facts.imports += 1;
                    }
                }
                Payload::FunctionSection(section) => {
                    for ty in section {
                        facts.functions.push(ty.map_err(malformed)?);
                    }
                }
                Payload::GlobalSection(section) => {
                    for (index, global) in (0_u32..).zip(section) {
                        let global = global.map_err(malformed)?;
                        if global.ty.mutable {
                            mutable.push((index, global.ty.content_type));
                        }
                        let mut operators = global.init_expr.get_operators_reader();
                        while !operators.eof() {
                            if let Operator::RefFunc { function_index } =
                                operators.read().map_err(malformed)?
                            {
                                facts.taken.push(function_index);
                            }
                        }
                    }
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export.map_err(malformed)?;
                        if export.kind == ExternalKind::Global {
                            names.insert(export.name, export.index);
                        }
                    }
                }
                Payload::ElementSection(section) => {
                    for element in section {
                        match element.map_err(malformed)?.items {
                            ElementItems::Functions(items) => {
                                for index in items {
                                    facts.taken.push(index.map_err(malformed)?);
                                }
                            }
                            ElementItems::Expressions(..) => {
                                return Err(unmetered("its tables hold expressions"));
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        let global = |name: &str, ty| {
            let index = names.get(name).copied();
            index
                .filter(|&index| mutable.contains(&(index, ty)))
                .ok_or_else(|| unmetered(format!("`{name}` is not an exported mutable {ty}")))
        };
        facts.meter = global(METER, ValType::I64)?;
        facts.mark = global(MARK, ValType::I64)?;
        let own = 2 + usize::from(names.contains_key("__stack_pointer"));
        if facts.meter == facts.mark || mutable.len() != own {
            return Err(unmetered(format!("its mutable globals are {mutable:?}")));
        }
        facts.refill = refill.ok_or_else(|| unmetered("it does not import the meter"))?;
        Ok(facts)
    }

    /// Recognises the inserted code that starts at `operators`, and its length.
    fn inserted(&self, operators: &[Operator<'_>]) -> Option<(Inserted, usize)> {
        let is_meter = |index: u32| index == self.meter;
        let (kind, taken) = match *operators {
            [
                Operator::GlobalGet { global_index: a },
                Operator::I64Const { value: 1.. },
                Operator::I64Sub,
                Operator::GlobalSet { global_index: b },
                Operator::GlobalGet { global_index: c },
                ..,
            ] if [a, b, c].into_iter().all(is_meter) => (Inserted::Charge, 5),
            [
                Operator::LocalTee { local_index: x },
                Operator::GlobalGet { global_index: a },
                Operator::LocalGet { local_index: y },
                Operator::I64ExtendI32U,
                Operator::I64Const { value: shift },
                Operator::I64ShrU,
                Operator::I64Sub,
                Operator::GlobalSet { global_index: b },
                Operator::GlobalGet { global_index: c },
                ..,
            ] if [a, b, c].into_iter().all(is_meter)
                && x == y
                && shift == i64::from(BULK_SHIFT) =>
            {
                (Inserted::Bulk, 9)
            }
            _ => return None,
        };
        let asks = match *operators.get(taken..)? {
            [
                Operator::I64Const { value: 0 },
                Operator::I64LtS,
                Operator::If {
                    blockty: BlockType::Empty,
                },
                Operator::Unreachable,
                Operator::End,
                ..,
            ] => false,
            [
                Operator::GlobalGet { global_index },
                Operator::I64LtS,
                Operator::If {
                    blockty: BlockType::Empty,
                },
                Operator::Call { function_index },
                Operator::End,
                ..,
            ] if global_index == self.mark && function_index == self.refill => true,
            _ => return None,
        };
        match (kind, asks) {
            (Inserted::Charge, true) => Some((Inserted::Question, taken + 5)),
            (_, true) => None,
            (kind, false) => Some((kind, taken + 5)),
        }
    }

    fn check_body(&self, operators: &[Operator<'_>]) -> Result<Calls, String> {
        let mut calls = Calls::default();
        // Open blocks, and whether each still owes a mark.
        let mut owing: Vec<bool> = Vec::new();
        let mut before = None;
        let mut position = 0;
        while position < operators.len() {
            if let Some((inserted, length)) = self.inserted(&operators[position..]) {
                calls.pays_at_entry |= position == 0 && inserted != Inserted::Bulk;
                let is_at_head =
                    position > 0 && matches!(operators[position - 1], Operator::Loop { .. });
                if is_at_head && inserted != Inserted::Bulk {
                    owing.last_mut().into_iter().for_each(|owes| *owes = false);
                } else if inserted == Inserted::Question {
                    owing.fill(false);
                }
                before = Some(inserted);
                position += length;
                continue;
            }
            let operator = &operators[position];
            let has_paid = matches!(before, Some(Inserted::Charge | Inserted::Question));
            let is_paid = match *operator {
                Operator::Loop { .. } => {
                    owing.push(true);
                    true
                }
                Operator::Block { .. } | Operator::If { .. } | Operator::TryTable { .. } => {
                    owing.push(false);
                    true
                }
                Operator::End => {
                    if owing.pop() == Some(true) {
                        return Err("a loop does not pay".to_owned());
                    }
                    true
                }
                // Another shape of blocks.
                Operator::Try { .. } | Operator::Delegate { .. } => false,
                Operator::GlobalGet { global_index } | Operator::GlobalSet { global_index } => {
                    global_index != self.meter && global_index != self.mark
                }
                Operator::Call { function_index } | Operator::ReturnCall { function_index } => {
                    match function_index.checked_sub(self.imports) {
                        Some(index) => {
                            calls.direct.push(index);
                            true
                        }
                        None => function_index != self.refill && has_paid,
                    }
                }
                Operator::CallIndirect { type_index, .. }
                | Operator::ReturnCallIndirect { type_index, .. } => {
                    calls.indirect.push(type_index);
                    true
                }
                Operator::RefFunc { function_index } => {
                    calls.taken.push(function_index);
                    true
                }
                Operator::MemoryGrow { .. } => has_paid,
                Operator::MemoryCopy { .. } | Operator::MemoryFill { .. } => {
                    before == Some(Inserted::Bulk)
                }
                // Bounded by the module's size, and refused before the snapshot anyway.
                Operator::MemoryInit { .. } | Operator::TableInit { .. } => true,
                Operator::CallRef { .. }
                | Operator::ReturnCallRef { .. }
                | Operator::TableGrow { .. }
                | Operator::TableFill { .. }
                | Operator::TableCopy { .. } => false,
                _ => true,
            };
            if !is_paid {
                return Err(format!("`{operator:?}` is not paid for"));
            }
            before = None;
            position += 1;
        }
        Ok(calls)
    }

    /// Checks that no cycle of calls avoids the functions that pay at entry.
    ///
    /// Removes functions that call only removed or paying ones; what is left is on or before a
    /// cycle.
    fn check_calls(&self, functions: &[Calls]) -> Result<(), SandboxError> {
        if functions.len() != self.functions.len() {
            return Err(unmetered("malformed: bodies are missing"));
        }
        let mut by_type: HashMap<&FuncType, Vec<u32>> = HashMap::new();
        let mut taken = self.taken.clone();
        taken.extend(functions.iter().flat_map(|calls| &calls.taken));
        taken.sort_unstable();
        taken.dedup();
        for index in taken {
            // An imported function that is called indirectly would be free, but for its own charge.
            let Some(number) = index.checked_sub(self.imports) else {
                return Err(unmetered("the address of an imported function is taken"));
            };
            let ty = self.function_type(number)?;
            by_type.entry(ty).or_default().push(number);
        }
        // Nodes are functions, then types: an indirect call goes by way of its type.
        let count = u32::try_from(functions.len()).map_err(malformed)?;
        let mut waiting_for = Vec::new();
        let mut callers = vec![Vec::new(); functions.len() + self.types.len()];
        let mut edge = |from: u32, to: u32| {
            callers
                .get_mut(to as usize)
                .ok_or_else(|| unmetered("malformed: an index without a definition"))?
                .push(from);
            Ok::<(), SandboxError>(())
        };
        for (number, calls) in (0..).zip(functions) {
            let mut out = 0_usize;
            if !calls.pays_at_entry {
                for &callee in &calls.direct {
                    edge(number, callee)?;
                }
                for &ty in &calls.indirect {
                    edge(number, count + ty)?;
                }
                out = calls.direct.len() + calls.indirect.len();
            }
            waiting_for.push(out);
        }
        for (number, ty) in (0..).zip(&self.types) {
            let targets = by_type.get(ty).map_or(&[][..], Vec::as_slice);
            for &target in targets {
                edge(count + number, target)?;
            }
            waiting_for.push(targets.len());
        }
        let mut done: Vec<usize> = (0..waiting_for.len())
            .filter(|&node| waiting_for[node] == 0)
            .collect();
        let mut finished = 0;
        while let Some(node) = done.pop() {
            finished += 1;
            for &caller in &callers[node] {
                let left = &mut waiting_for[caller as usize];
                *left -= 1;
                if *left == 0 {
                    done.push(caller as usize);
                }
            }
        }
        if finished == waiting_for.len() {
            Ok(())
        } else {
            Err(unmetered(
                "functions call each other in a circle that does not pay",
            ))
        }
    }

    fn function_type(&self, number: u32) -> Result<&FuncType, SandboxError> {
        let ty = self.functions.get(number as usize);
        ty.and_then(|&ty| self.types.get(ty as usize))
            .ok_or_else(|| unmetered("malformed: an index without a definition"))
    }
}
