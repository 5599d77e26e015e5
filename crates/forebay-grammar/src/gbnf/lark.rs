//! Rules to Lark.
//!
//! Terminals are matched greedily, rules are not. So all that stands side by side and is regular becomes one terminal:
//! within it every reading is tried, and a grammar without recursion is matched exactly.

use std::collections::HashMap;
use std::fmt::Write;

use super::{Gbnf, Node};

/// The whole grammar.
pub(super) fn write(grammar: &Gbnf) -> String {
    let regular = regular_rules(grammar);
    let mut writer = Writer { regular, terminals: HashMap::new(), lark: String::new() };
    let root = writer.name(grammar.root);
    let _ = writeln!(writer.lark, "start: {root}");
    for (number, rule) in grammar.rules.iter().enumerate() {
        let body = if writer.regular[number] { writer.terminal(&rule.body) } else { writer.rule(&rule.body) };
        let name = writer.name(number);
        let _ = writeln!(writer.lark, "{name}: {body}");
    }
    let mut terminals: Vec<(usize, String)> =
        writer.terminals.drain().map(|(body, number)| (number, body)).collect();
    terminals.sort_unstable();
    for (number, body) in terminals {
        let _ = writeln!(writer.lark, "P{number}: {body}");
    }
    writer.lark
}

struct Writer {
    /// By rule.
    regular: Vec<bool>,
    /// The numbers of the terminals that stand for a part of a rule.
    terminals: HashMap<String, usize>,
    lark: String,
}

impl Writer {
    /// What a rule is called: the grammar's own names may not be names in Lark.
    fn name(&self, number: usize) -> String {
        if self.regular[number] { format!("T{number}") } else { format!("r{number}") }
    }

    fn is_regular(&self, node: &Node) -> bool {
        match node {
            Node::Text(_) | Node::Class { .. } => true,
            Node::Rule(number) => self.regular[*number],
            Node::Sequence(all) | Node::Choice(all) => all.iter().all(|node| self.is_regular(node)),
            Node::Repeat { node, .. } => self.is_regular(node),
        }
    }

    /// A part of a rule that is not regular as a whole.
    fn rule(&mut self, node: &Node) -> String {
        if self.is_regular(node) {
            return self.part(std::slice::from_ref(node), " ");
        }
        match node {
            Node::Sequence(all) => {
                let mut flat = Vec::new();
                flatten(all, &mut flat);
                self.runs(&flat, " ")
            }
            Node::Choice(all) => format!("({})", self.runs(&all.iter().collect::<Vec<_>>(), " | ")),
            Node::Repeat { node, least, most } => format!("({}){}", self.rule(node), suffix(*least, *most)),
            Node::Rule(number) => self.name(*number),
            Node::Text(_) | Node::Class { .. } => self.terminal(node),
        }
    }

    /// Nodes with a separator between them, neighbours that are regular as one terminal.
    fn runs(&mut self, all: &[&Node], between: &str) -> String {
        let mut parts = Vec::new();
        let mut run: Vec<Node> = Vec::new();
        for &node in all {
            if self.is_regular(node) {
                run.push(node.clone());
                continue;
            }
            if !run.is_empty() {
                parts.push(self.part(&std::mem::take(&mut run), between));
            }
            parts.push(self.rule(node));
        }
        if !run.is_empty() {
            parts.push(self.part(&run, between));
        }
        parts.join(between)
    }

    /// A terminal for these nodes.
    fn part(&mut self, nodes: &[Node], between: &str) -> String {
        if let [Node::Rule(number)] = nodes {
            return self.name(*number);
        }
        let all: Vec<String> = nodes.iter().map(|node| self.terminal(node)).collect();
        let body = all.join(between);
        let body = if body.is_empty() { "\"\"".to_owned() } else { body };
        let next = self.terminals.len();
        format!("P{}", self.terminals.entry(body).or_insert(next))
    }

    fn terminal(&self, node: &Node) -> String {
        match node {
            Node::Text(text) if text.is_empty() => "\"\"".to_owned(),
            Node::Text(text) => format!("/{}/", text.chars().map(escaped).collect::<String>()),
            Node::Class { ranges, negated } if ranges.is_empty() && *negated => {
                r"/[\x{0}-\x{10ffff}]/".to_owned()
            }
            Node::Class { ranges, negated } => {
                let range = |&(first, last): &(char, char)| format!("{}-{}", escaped(first), escaped(last));
                let all: String = ranges.iter().map(range).collect();
                format!("/[{}{all}]/", if *negated { "^" } else { "" })
            }
            Node::Rule(number) => self.name(*number),
            Node::Sequence(all) if all.is_empty() => "\"\"".to_owned(),
            Node::Sequence(all) => {
                let all: Vec<String> = all.iter().map(|node| self.terminal(node)).collect();
                format!("({})", all.join(" "))
            }
            Node::Choice(all) => {
                let all: Vec<String> = all.iter().map(|node| self.terminal(node)).collect();
                format!("({})", all.join(" | "))
            }
            Node::Repeat { node, least, most } => {
                format!("({}){}", self.terminal(node), suffix(*least, *most))
            }
        }
    }
}

/// Sequences within sequences are one sequence.
fn flatten<'a>(all: &'a [Node], into: &mut Vec<&'a Node>) {
    for node in all {
        match node {
            Node::Sequence(inner) => flatten(inner, into),
            other => into.push(other),
        }
    }
}

fn escaped(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}

fn suffix(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, Some(1)) => "?".to_owned(),
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

/// By rule: whether no way leads from it to a rule on a circle.
fn regular_rules(grammar: &Gbnf) -> Vec<bool> {
    let uses: Vec<Vec<usize>> = grammar.rules.iter().map(|rule| used(&rule.body)).collect();
    // A rule is regular when all that it uses are: those on a circle never become it.
    let mut regular = vec![false; uses.len()];
    loop {
        let mut changed = false;
        for number in 0..uses.len() {
            let now = !regular[number] && uses[number].iter().all(|&used| regular[used]);
            regular[number] |= now;
            changed |= now;
        }
        if !changed {
            return regular;
        }
    }
}

fn used(node: &Node) -> Vec<usize> {
    match node {
        Node::Text(_) | Node::Class { .. } => Vec::new(),
        Node::Rule(number) => vec![*number],
        Node::Sequence(all) | Node::Choice(all) => all.iter().flat_map(used).collect(),
        Node::Repeat { node, .. } => used(node),
    }
}
