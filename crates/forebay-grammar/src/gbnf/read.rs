//! Text to rules.

use std::collections::HashMap;

use super::{Found, Gbnf, GbnfError, MAX_BYTES, MAX_NESTING, MAX_REPEAT, MAX_RULES, Node, Problem, Rule};

/// Reads and checks a grammar.
pub fn read(text: &str) -> Result<Gbnf, GbnfError> {
    let mut reader = Reader { text, at: 0, numbers: HashMap::new(), rules: Vec::new(), depth: 0 };
    if text.len() > MAX_BYTES {
        return Err(reader.error(0, Problem::TooLong { bytes: text.len() }));
    }
    reader.skip();
    while reader.at < text.len() {
        reader.rule()?;
    }
    reader.finish()
}

/// A rule while others are still to come.
struct Slot<'a> {
    name: &'a str,
    /// Where it was first named.
    named: usize,
    body: Option<Node>,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    numbers: HashMap<&'a str, usize>,
    rules: Vec<Slot<'a>>,
    depth: usize,
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '-'
}

impl<'a> Reader<'a> {
    /// An error at a byte of the text.
    fn error(&self, at: usize, problem: Problem) -> GbnfError {
        let before = &self.text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        GbnfError { line, column, problem }
    }

    fn unexpected(&self, expected: &'static str) -> GbnfError {
        let found = self.peek().map_or(Found::End, Found::Char);
        self.error(self.at, Problem::Unexpected { expected, found })
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn takes(&mut self, text: &str) -> bool {
        let there = self.text[self.at..].starts_with(text);
        self.at += if there { text.len() } else { 0 };
        there
    }

    /// White space and comments.
    fn skip(&mut self) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\r' | '\n' => self.at += 1,
                '#' => self.at += self.text[self.at..].find('\n').unwrap_or(self.text.len() - self.at),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = &self.text[self.at..];
        let length = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        self.at += length;
        (length > 0).then(|| &rest[..length])
    }

    /// The number of the rule of this name, which may still be to come.
    fn number(&mut self, name: &'a str, named: usize) -> Result<usize, GbnfError> {
        if let Some(&number) = self.numbers.get(name) {
            return Ok(number);
        }
        if self.rules.len() == MAX_RULES {
            return Err(self.error(named, Problem::TooManyRules));
        }
        self.rules.push(Slot { name, named, body: None });
        self.numbers.insert(name, self.rules.len() - 1);
        Ok(self.rules.len() - 1)
    }

    fn rule(&mut self) -> Result<(), GbnfError> {
        let named = self.at;
        let Some(name) = self.name() else { return Err(self.unexpected("the name of a rule")) };
        self.skip();
        if !self.takes("::=") {
            return Err(self.unexpected("::="));
        }
        let number = self.number(name, named)?;
        if self.rules[number].body.is_some() {
            return Err(self.error(named, Problem::Duplicate { name: name.to_owned() }));
        }
        let body = self.choice()?;
        if self.at < self.text.len() && !self.a_rule_begins() {
            return Err(self.unexpected("a rule, an item or |"));
        }
        self.rules[number].body = Some(body);
        Ok(())
    }

    fn a_rule_begins(&mut self) -> bool {
        let before = self.at;
        let begins = self.name().is_some() && {
            self.skip();
            self.takes("::=")
        };
        self.at = before;
        begins
    }

    fn choice(&mut self) -> Result<Node, GbnfError> {
        let mut all = vec![self.sequence()?];
        while self.takes("|") {
            all.push(self.sequence()?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Choice(all) })
    }

    fn sequence(&mut self) -> Result<Node, GbnfError> {
        let mut all = Vec::new();
        loop {
            self.skip();
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('(') => self.group()?,
                Some('.') => {
                    self.at += 1;
                    Node::Class { ranges: Vec::new(), negated: true }
                }
                Some(c) if is_name(c) && !self.a_rule_begins() => {
                    let named = self.at;
                    let name = self.name().unwrap_or_default();
                    Node::Rule(self.number(name, named)?)
                }
                _ => break,
            };
            all.push(self.repeated(item)?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Sequence(all) })
    }

    fn group(&mut self) -> Result<Node, GbnfError> {
        let opened = self.at;
        self.at += 1;
        self.depth += 1;
        if self.depth > MAX_NESTING {
            return Err(self.error(opened, Problem::TooDeep));
        }
        let inner = self.choice()?;
        self.depth -= 1;
        match self.peek() {
            Some(')') => self.at += 1,
            Some(_) if !self.a_rule_begins() => return Err(self.unexpected("an item, | or )")),
            _ => return Err(self.error(opened, Problem::Unclosed { what: "parenthesis" })),
        }
        Ok(inner)
    }

    /// `item` with the repetition behind it, if there is one.
    fn repeated(&mut self, item: Node) -> Result<Node, GbnfError> {
        self.skip();
        let Some((least, most)) = self.repetition()? else { return Ok(item) };
        self.skip();
        let again = self.at;
        if self.repetition()?.is_some() {
            return Err(self.error(again, Problem::TwoRepeats));
        }
        if item == Node::Text(String::new()) {
            return Ok(item);
        }
        Ok(Node::Repeat { node: Box::new(item), least, most })
    }

    fn repetition(&mut self) -> Result<Option<(u32, Option<u32>)>, GbnfError> {
        let plain = match self.peek() {
            Some('?') => (0, Some(1)),
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('{') => return self.counts().map(Some),
            _ => return Ok(None),
        };
        self.at += 1;
        Ok(Some(plain))
    }

    fn counts(&mut self) -> Result<(u32, Option<u32>), GbnfError> {
        let opened = self.at;
        let Some(length) = self.text[opened..].find('}') else {
            return Err(self.error(opened, Problem::Unclosed { what: "repetition" }));
        };
        let inner = &self.text[opened + 1..opened + length];
        let count = |text: &str| text.trim().parse().ok().filter(|n| *n <= MAX_REPEAT);
        let counts = match inner.split_once(',') {
            None => count(inner).map(|n| (n, Some(n))),
            Some((least, most)) if most.trim().is_empty() => count(least).map(|least| (least, None)),
            Some((least, most)) => count(least).zip(count(most)).map(|(least, most)| (least, Some(most))),
        };
        match counts {
            Some((least, most)) if most.is_none_or(|most| least <= most) => {
                self.at = opened + length + 1;
                Ok((least, most))
            }
            _ => {
                let found: String = self.text[opened..].chars().take(40.min(length + 1)).collect();
                Err(self.error(opened, Problem::Repeat { found }))
            }
        }
    }

    fn literal(&mut self) -> Result<Node, GbnfError> {
        let opened = self.at;
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            match self.next() {
                None | Some('\n') => return Err(self.error(opened, Problem::Unclosed { what: "literal" })),
                Some('"') => break,
                Some('\\') => match self.escape()? {
                    Escaped::Char(c) => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    Escaped::Byte(byte) => bytes.push(byte),
                },
                Some(c) => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        String::from_utf8(bytes).map(Node::Text).map_err(|_| self.error(opened, Problem::NotText))
    }

    fn class(&mut self) -> Result<Node, GbnfError> {
        let opened = self.at;
        self.at += 1;
        let negated = self.takes("^");
        let mut ranges = Vec::new();
        loop {
            if self.takes("]") {
                break;
            }
            let first = self.class_char(opened)?;
            // A hyphen in front of the bracket is a character.
            let is_range = self.text[self.at..].starts_with('-') && !self.text[self.at..].starts_with("-]");
            let last = if is_range {
                self.at += 1;
                self.class_char(opened)?
            } else {
                first
            };
            ranges.push((first.min(last), first.max(last)));
        }
        if ranges.is_empty() && !negated {
            return Err(self.error(opened, Problem::EmptyClass));
        }
        Ok(Node::Class { ranges, negated })
    }

    fn class_char(&mut self, opened: usize) -> Result<char, GbnfError> {
        let at = self.at;
        match self.next() {
            None | Some('\n') => Err(self.error(opened, Problem::Unclosed { what: "class" })),
            Some('\\') => match self.escape()? {
                Escaped::Char(c) => Ok(c),
                Escaped::Byte(byte) if byte.is_ascii() => Ok(char::from(byte)),
                Escaped::Byte(_) => Err(self.error(at, Problem::NotText)),
            },
            Some(c) => Ok(c),
        }
    }

    /// What stands behind a backslash.
    fn escape(&mut self) -> Result<Escaped, GbnfError> {
        let at = self.at - 1;
        let letter = self.next();
        let digits = match letter {
            Some('n') => return Ok(Escaped::Char('\n')),
            Some('r') => return Ok(Escaped::Char('\r')),
            Some('t') => return Ok(Escaped::Char('\t')),
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^')) => return Ok(Escaped::Char(c)),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => 0,
        };
        let code = self
            .text
            .get(self.at..self.at + digits)
            .filter(|code| digits > 0 && code.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let value = code.and_then(|code| u32::from_str_radix(code, 16).ok());
        let escaped = match (digits, value) {
            (2, Some(value)) => u8::try_from(value).ok().map(Escaped::Byte),
            (_, Some(value)) => char::from_u32(value).map(Escaped::Char),
            _ => None,
        };
        self.at += digits;
        let escape = letter.map(String::from).unwrap_or_default();
        escaped.ok_or_else(|| self.error(at, Problem::Escape { escape: escape + code.unwrap_or_default() }))
    }

    fn finish(self) -> Result<Gbnf, GbnfError> {
        if let Some(slot) = self.rules.iter().find(|slot| slot.body.is_none()) {
            return Err(self.error(slot.named, Problem::Undefined { name: slot.name.to_owned() }));
        }
        let Some(&root) = self.numbers.get("root") else {
            return Err(self.error(self.text.len(), Problem::NoRoot));
        };
        let ends = can_end(&self.rules);
        if let Some((slot, _)) = self.rules.iter().zip(ends).find(|(_, ends)| !ends) {
            return Err(self.error(slot.named, Problem::Endless { name: slot.name.to_owned() }));
        }
        let rule =
            |slot: Slot<'_>| Rule { name: slot.name.to_owned(), body: slot.body.unwrap_or(Node::Rule(0)) };
        Ok(Gbnf { rules: self.rules.into_iter().map(rule).collect(), root })
    }
}

enum Escaped {
    Char(char),
    Byte(u8),
}

/// By rule: whether some text of finite length fits it.
fn can_end(rules: &[Slot<'_>]) -> Vec<bool> {
    let mut ends = vec![false; rules.len()];
    // A rule that cannot end yet can only be freed by another one: as many rounds as rules at most.
    loop {
        let mut changed = false;
        for number in 0..rules.len() {
            let frees =
                !ends[number] && rules[number].body.as_ref().is_some_and(|body| node_ends(body, &ends));
            ends[number] |= frees;
            changed |= frees;
        }
        if !changed {
            return ends;
        }
    }
}

fn node_ends(node: &Node, ends: &[bool]) -> bool {
    match node {
        Node::Text(_) | Node::Class { .. } => true,
        Node::Rule(number) => ends[*number],
        Node::Sequence(all) => all.iter().all(|node| node_ends(node, ends)),
        Node::Choice(all) => all.iter().any(|node| node_ends(node, ends)),
        Node::Repeat { node, least, .. } => *least == 0 || node_ends(node, ends),
    }
}
