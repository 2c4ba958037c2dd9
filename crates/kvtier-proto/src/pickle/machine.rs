//! The stack machine: opcodes in, a small graph of plain values out. Nothing is called.
//!
//! Every opcode creates at most one value of fixed size (a value refers to text and bytes of the input, or to an entry
//! of the machine's tables), so memory is bounded by the number of steps. Values never own other values: dropping and
//! comparing them cannot recurse, and a list that contains itself is just an index.

use std::ops::Range;

use super::globals::Global;
use super::input::{Input, error};
use crate::wire::{DecodeError, reserve};

/// Most unclosed marks. Real pickles nest four.
const MAX_MARKS: usize = 64;

/// One value on the stack or in the memo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Global(Global),
    /// Members: a range of [`Machine::items`].
    Tuple {
        start: u32,
        len: u32,
    },
    /// Index into the machine's lists.
    List(u32),
    /// Index into the machine's dicts.
    Dict(u32),
    /// A call that was not made: index into [`Machine::calls`].
    Call(u32),
    /// A persistent id: index into [`Machine::persistent`].
    Persistent(u32),
}

/// A call a real unpickler would make.
#[derive(Clone, Copy, Debug)]
pub(super) struct PickleCall<'a> {
    pub(super) callable: Value<'a>,
    pub(super) arguments: Value<'a>,
    /// What BUILD would give to the object.
    pub(super) state: Option<Value<'a>>,
}

/// The tables values refer to.
#[derive(Debug, Default)]
pub(super) struct Machine<'a> {
    items: Vec<Value<'a>>,
    lists: Vec<Vec<Value<'a>>>,
    dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    calls: Vec<PickleCall<'a>>,
    persistent: Vec<Value<'a>>,
}

impl<'a> Machine<'a> {
    pub(super) fn tuple(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match value {
            Value::Tuple { start, len } => self
                .items
                .get(start as usize..(start as usize + len as usize)),
            _ => None,
        }
    }

    pub(super) fn list(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match value {
            Value::List(index) => self.lists.get(index as usize).map(Vec::as_slice),
            _ => None,
        }
    }

    pub(super) fn dict(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match value {
            Value::Dict(index) => self.dicts.get(index as usize).map(Vec::as_slice),
            _ => None,
        }
    }

    pub(super) fn call(&self, value: Value<'a>) -> Option<PickleCall<'a>> {
        match value {
            Value::Call(index) => self.calls.get(index as usize).copied(),
            _ => None,
        }
    }

    pub(super) fn persistent(&self, value: Value<'a>) -> Option<Value<'a>> {
        match value {
            Value::Persistent(index) => self.persistent.get(index as usize).copied(),
            _ => None,
        }
    }
}

/// What is left of the steps allowed for one message.
#[derive(Debug)]
pub(super) struct Budget {
    left: usize,
    allowed: usize,
}

impl Budget {
    pub(super) fn new(allowed: usize) -> Budget {
        Budget {
            left: allowed,
            allowed,
        }
    }

    fn spend(&mut self) -> Result<(), DecodeError> {
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| error(format!("more than the allowed {} steps", self.allowed)))?;
        Ok(())
    }
}

/// Runs the pickle at the start of `input`. Returns the tables, the result and the length of the pickle in bytes.
pub(super) fn run<'a>(
    input: &'a [u8],
    budget: &mut Budget,
) -> Result<(Machine<'a>, Value<'a>, usize), DecodeError> {
    let mut run = Run {
        input: Input::new(input),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        machine: Machine::default(),
    };
    let result = run.all(budget)?;
    Ok((run.machine, result, run.input.at()))
}

struct Run<'a> {
    input: Input<'a>,
    stack: Vec<Value<'a>>,
    /// Height of the stack at each open mark.
    marks: Vec<usize>,
    memo: Vec<Value<'a>>,
    machine: Machine<'a>,
}

impl<'a> Run<'a> {
    fn all(&mut self, budget: &mut Budget) -> Result<Value<'a>, DecodeError> {
        loop {
            budget.spend()?;
            let offset = self.input.at();
            let opcode = self.input.byte()?;
            if opcode == b'.' {
                let result = self.pop()?;
                if !self.stack.is_empty() || !self.marks.is_empty() {
                    return Err(error(format!(
                        "values are left below the result at byte {offset}"
                    )));
                }
                return Ok(result);
            }
            self.step(opcode, offset)?;
        }
    }

    fn step(&mut self, opcode: u8, offset: usize) -> Result<(), DecodeError> {
        let value = match opcode {
            0x80 => return self.protocol(),
            0x95 => return self.frame(),
            b'(' => return self.mark(),
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Int(i64::from(i32::from_le_bytes(self.input.array()?))),
            b'K' => Value::Int(i64::from(self.input.byte()?)),
            b'M' => Value::Int(i64::from(u16::from_le_bytes(self.input.array()?))),
            0x8a => Value::Int(self.input.long1()?),
            0x8c => Value::Text(self.input.text(1)?),
            b'X' => Value::Text(self.input.text(4)?),
            0x8d => Value::Text(self.input.text(8)?),
            b'C' => Value::Bytes(self.input.sized(1)?),
            b'B' => Value::Bytes(self.input.sized(4)?),
            0x8e => Value::Bytes(self.input.sized(8)?),
            b')' => Value::Tuple { start: 0, len: 0 },
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let members = self.pop_mark()?;
                self.tuple(members.len())?
            }
            b']' => {
                reserve(&mut self.machine.lists, 1)?;
                self.machine.lists.push(Vec::new());
                Value::List(index(self.machine.lists.len() - 1))
            }
            b'}' => {
                reserve(&mut self.machine.dicts, 1)?;
                self.machine.dicts.push(Vec::new());
                Value::Dict(index(self.machine.dicts.len() - 1))
            }
            b'c' => {
                let module = self.input.line()?;
                let name = self.input.line()?;
                Value::Global(Global::resolve(module, name)?)
            }
            0x93 => match (self.pop()?, self.pop()?) {
                (Value::Text(name), Value::Text(module)) => {
                    Value::Global(Global::resolve(module, name)?)
                }
                _ => {
                    return Err(error(format!(
                        "a global at byte {offset} is not named by two texts"
                    )));
                }
            },
            b'R' | 0x81 => {
                let arguments = self.pop()?;
                let callable = self.pop()?;
                self.call(callable, arguments, offset)?
            }
            b'Q' => {
                let id = self.pop()?;
                reserve(&mut self.machine.persistent, 1)?;
                self.machine.persistent.push(id);
                Value::Persistent(index(self.machine.persistent.len() - 1))
            }
            b'h' => {
                let slot = usize::from(self.input.byte()?);
                self.recall(slot)?
            }
            b'j' => {
                let slot = u32::from_le_bytes(self.input.array()?) as usize;
                self.recall(slot)?
            }
            0x94 => return self.remember(self.memo.len()),
            b'q' => {
                let slot = usize::from(self.input.byte()?);
                return self.remember(slot);
            }
            b'r' => {
                let slot = u32::from_le_bytes(self.input.array()?) as usize;
                return self.remember(slot);
            }
            b'a' => {
                let from = self.stack.len().wrapping_sub(1);
                return self.append(from, offset);
            }
            b'e' => {
                let members = self.pop_mark()?;
                return self.append(members.start, offset);
            }
            b's' => {
                let from = self.stack.len().wrapping_sub(2);
                return self.set_items(from, offset);
            }
            b'u' => {
                let members = self.pop_mark()?;
                return self.set_items(members.start, offset);
            }
            b'b' => return self.build(offset),
            _ => {
                return Err(error(format!(
                    "the opcode 0x{opcode:02x} at byte {offset} is not allowed"
                )));
            }
        };
        reserve(&mut self.stack, 1)?;
        self.stack.push(value);
        Ok(())
    }

    fn protocol(&mut self) -> Result<(), DecodeError> {
        let version = self.input.byte()?;
        match version {
            2..=5 => Ok(()),
            _ => Err(error(format!("protocol {version}; allowed are 2 to 5"))),
        }
    }

    /// Frames only help a reader that streams; the length must be true all the same.
    fn frame(&mut self) -> Result<(), DecodeError> {
        let length = u64::from_le_bytes(self.input.array()?);
        if length > self.input.rest().len() as u64 {
            return Err(error(format!(
                "a frame of {length} bytes, but {} are left",
                self.input.rest().len()
            )));
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<(), DecodeError> {
        if self.marks.len() == MAX_MARKS {
            return Err(error(format!("nested deeper than the allowed {MAX_MARKS}")));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// The stack positions above the last mark, which is removed.
    fn pop_mark(&mut self) -> Result<Range<usize>, DecodeError> {
        let start = self.marks.pop().ok_or_else(|| error("a mark is missing"))?;
        Ok(start..self.stack.len())
    }

    /// Lowest stack position an opcode may use: below an open mark nothing may be taken.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value<'a>, DecodeError> {
        if self.stack.len() <= self.floor() {
            return Err(error(format!(
                "the stack is empty before byte {}",
                self.input.at()
            )));
        }
        self.stack.pop().ok_or_else(|| error("the stack is empty"))
    }

    fn tuple(&mut self, len: usize) -> Result<Value<'a>, DecodeError> {
        let start = self
            .stack
            .len()
            .checked_sub(len)
            .filter(|&start| start >= self.floor());
        let start = start.ok_or_else(|| {
            error(format!(
                "too few values for a tuple before byte {}",
                self.input.at()
            ))
        })?;
        let first = self.machine.items.len();
        reserve(&mut self.machine.items, len)?;
        self.machine.items.extend(self.stack.drain(start..));
        Ok(Value::Tuple {
            start: index(first),
            len: index(len),
        })
    }

    /// Notes a call of one of the known globals.
    fn call(
        &mut self,
        callable: Value<'a>,
        arguments: Value<'a>,
        offset: usize,
    ) -> Result<Value<'a>, DecodeError> {
        if !matches!(
            (callable, arguments),
            (Value::Global(_), Value::Tuple { .. })
        ) {
            return Err(error(format!(
                "a call at byte {offset} is not of a global with a tuple"
            )));
        }
        reserve(&mut self.machine.calls, 1)?;
        self.machine.calls.push(PickleCall {
            callable,
            arguments,
            state: None,
        });
        Ok(Value::Call(index(self.machine.calls.len() - 1)))
    }

    /// Moves the values from stack position `from` on to the end of the list below them.
    fn append(&mut self, from: usize, offset: usize) -> Result<(), DecodeError> {
        let target = self.below(from);
        let Some(Value::List(list)) = target else {
            return Err(error(format!("nothing to append to at byte {offset}")));
        };
        let members = self.stack.drain(from..);
        let list = &mut self.machine.lists[list as usize];
        reserve(list, members.len())?;
        list.extend(members);
        Ok(())
    }

    /// Moves the pairs from stack position `from` on into the dict below them.
    fn set_items(&mut self, from: usize, offset: usize) -> Result<(), DecodeError> {
        let target = self.below(from);
        let Some(Value::Dict(dict)) = target else {
            return Err(error(format!("no dict to fill at byte {offset}")));
        };
        let mut members = self.stack.drain(from..);
        let dict = &mut self.machine.dicts[dict as usize];
        reserve(dict, members.len().div_ceil(2))?;
        while let Some(key) = members.next() {
            let value = members
                .next()
                .ok_or_else(|| error("a dict key has no value"))?;
            dict.push((key, value));
        }
        Ok(())
    }

    /// The value just below stack position `from`, if it is this side of the last mark.
    fn below(&self, from: usize) -> Option<Value<'a>> {
        let position = from
            .checked_sub(1)
            .filter(|&position| position >= self.floor())?;
        if from > self.stack.len() {
            return None;
        }
        self.stack.get(position).copied()
    }

    fn build(&mut self, offset: usize) -> Result<(), DecodeError> {
        let state = self.pop()?;
        let object = self.pop()?;
        let call = match object {
            Value::Call(index) => self.machine.calls.get_mut(index as usize),
            _ => None,
        };
        match call {
            Some(call) if call.state.is_none() => call.state = Some(state),
            _ => {
                return Err(error(format!(
                    "no fresh object to give a state at byte {offset}"
                )));
            }
        }
        self.stack.push(object);
        Ok(())
    }

    /// Python numbers memo entries one by one; a jump could only serve to make the table large.
    fn remember(&mut self, slot: usize) -> Result<(), DecodeError> {
        let value = self.pop()?;
        self.stack.push(value);
        let known = self.memo.len();
        match self.memo.get_mut(slot) {
            Some(entry) => *entry = value,
            None if slot == known => {
                reserve(&mut self.memo, 1)?;
                self.memo.push(value);
            }
            None => {
                return Err(error(format!(
                    "memo entry {slot} is written while there are {known}"
                )));
            }
        }
        Ok(())
    }

    fn recall(&self, slot: usize) -> Result<Value<'a>, DecodeError> {
        self.memo
            .get(slot)
            .copied()
            .ok_or_else(|| error(format!("memo entry {slot} is read but not written")))
    }
}

/// Table positions fit 32 bits because the budget of steps does; saturating keeps a wrong one out of range.
fn index(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}
