//! The tree: a node is a block, its children begin with the tokens behind it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use forebay_model::KvBlock;
use forebay_model::kv::{BLOCK, CARRIES};
use forebay_store::prefix::Key;

use super::disk::{Stored, key_of};

/// Index of a node.
pub(super) type NodeId = usize;

/// A block in memory, on disk, or both. One that is in neither stays while it has children.
struct Node {
    parent: Option<NodeId>,
    /// 1 to [`BLOCK`]; only a full one has children.
    tokens: Vec<u32>,
    block: Option<Arc<KvBlock>>,
    /// Hidden states by their place in the block, ascending.
    carries: Vec<(usize, Vec<f32>)>,
    key: Key,
    stored: Option<Stored>,
    /// The file lacks a hidden state that is known by now.
    outdated: bool,
    /// Files of fewer tokens that this one makes superfluous, and how many they have.
    superseded: Vec<(Stored, usize)>,
    /// The file made room for others: it is not written again before the block is used again.
    left_out: bool,
    used: u64,
    children: Vec<NodeId>,
}

/// What a store knows of a block.
pub(super) struct StoredBlock {
    pub file: Stored,
    pub parent: Key,
    pub tokens: Vec<u32>,
}

#[derive(Default)]
pub(super) struct Tree {
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    roots: Vec<NodeId>,
    /// Counts uses.
    clock: u64,
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Tree {
    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("ids are of nodes that are there")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("ids are of nodes that are there")
    }

    fn children(&self, parent: Option<NodeId>) -> &[NodeId] {
        parent.map_or(&self.roots, |parent| &self.node(parent).children)
    }

    /// What tells a node's block from all others; zeros for none.
    pub fn key(&self, id: Option<NodeId>) -> Key {
        id.map_or(Key::default(), |id| self.node(id).key)
    }

    /// The child that begins with most of `tokens`, and how many those are.
    fn best_child(&self, parent: Option<NodeId>, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let all = self.children(parent).iter().map(|id| (*id, common(&self.node(*id).tokens, tokens)));
        all.filter(|(_, rows)| *rows > 0).max_by_key(|(_, rows)| *rows)
    }

    fn add(&mut self, parent: Option<NodeId>, tokens: &[u32]) -> NodeId {
        let node = Node {
            parent,
            tokens: tokens.to_vec(),
            block: None,
            carries: Vec::new(),
            key: key_of(&self.key(parent), tokens),
            stored: None,
            outdated: false,
            superseded: Vec::new(),
            left_out: false,
            used: self.clock,
            children: Vec::new(),
        };
        let id = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[id] = Some(node);
        match parent {
            Some(parent) => self.node_mut(parent).children.push(id),
            None => self.roots.push(id),
        }
        id
    }

    fn use_node(&mut self, id: NodeId) {
        self.clock += 1;
        let now = self.clock;
        let node = self.node_mut(id);
        (node.used, node.left_out) = (now, false);
    }

    /// Enters a sequence and returns its nodes, the first one first.
    pub fn enter(&mut self, tokens: &[u32], blocks: &[Arc<KvBlock>], carry: Option<&[f32]>) -> Vec<NodeId> {
        let mut path = Vec::new();
        for (part, block) in tokens.chunks(BLOCK).zip(blocks) {
            let id = self.enter_part(path.last().copied(), part, block);
            path.push(id);
        }
        if let (Some(carry), Some(&last)) = (carry, path.last()) {
            self.node_mut(last).keep_carry((tokens.len() - 1) % BLOCK, carry);
        }
        // The beginning is used by all that follows: it counts as used last.
        path.iter().rev().for_each(|id| self.use_node(*id));
        path
    }

    fn enter_part(&mut self, parent: Option<NodeId>, part: &[u32], block: &Arc<KvBlock>) -> NodeId {
        let best = self.best_child(parent, part);
        match best {
            Some((id, rows)) if rows == part.len() => {
                let node = self.node_mut(id);
                if node.block.is_none() && node.tokens.len() == rows {
                    node.block = Some(block.clone());
                }
                id
            }
            // It goes on where an earlier one ended.
            Some((id, rows)) if rows == self.node(id).tokens.len() => {
                let key = key_of(&self.key(parent), part);
                let node = self.node_mut(id);
                node.superseded.extend(node.stored.take().map(|file| (file, rows)));
                node.outdated = false;
                node.tokens = part.to_vec();
                node.block = Some(block.clone());
                node.key = key;
                id
            }
            _ => {
                let id = self.add(parent, part);
                self.node_mut(id).block = Some(block.clone());
                id
            }
        }
    }

    /// The nodes that `wanted` begins with, and how many of its tokens each has; they count as used.
    pub fn walk(&mut self, wanted: &[u32]) -> Vec<(NodeId, usize)> {
        let mut path: Vec<(NodeId, usize)> = Vec::new();
        for part in wanted.chunks(BLOCK) {
            let parent = path.last().map(|(id, _)| *id);
            let Some((id, rows)) = self.best_child(parent, part) else { break };
            let node = self.node(id);
            if node.block.is_none() && node.stored.is_none() {
                break;
            }
            path.push((id, rows));
            if rows < BLOCK {
                break;
            }
        }
        path.iter().rev().for_each(|(id, _)| self.use_node(*id));
        path
    }

    pub fn block(&self, id: NodeId) -> Option<Arc<KvBlock>> {
        self.node(id).block.clone()
    }

    pub fn stored(&self, id: NodeId) -> Option<Stored> {
        self.node(id).stored.clone()
    }

    pub fn tokens(&self, id: NodeId) -> &[u32] {
        &self.node(id).tokens
    }

    pub fn parent_key(&self, id: NodeId) -> Key {
        self.key(self.node(id).parent)
    }

    pub fn carry(&self, id: NodeId, at: usize) -> Option<&[f32]> {
        self.node(id).carries.iter().find(|(place, _)| *place == at).map(|(_, carry)| &carry[..])
    }

    pub fn carries(&self, id: NodeId) -> &[(usize, Vec<f32>)] {
        &self.node(id).carries
    }

    /// Takes in a block that was read from disk.
    pub fn loaded(
        &mut self,
        id: NodeId,
        block: Arc<KvBlock>,
        carries: Vec<(usize, Vec<f32>)>,
    ) -> Arc<KvBlock> {
        let node = self.node_mut(id);
        node.block = Some(block.clone());
        node.carries = carries;
        block
    }

    /// Blocks in memory.
    pub fn blocks(&self) -> usize {
        self.nodes.iter().flatten().filter(|node| node.block.is_some()).count()
    }

    /// Gives up the block that was used least recently, of those on which no other in memory rests. A block that a sequence
    /// holds stays: without it here nothing would be free. Except, last of all, one of `wanted`, which a sequence wants to
    /// write to: once it holds it alone it needs no copy. `false` if there is none.
    pub fn evict(&mut self, wanted: &[Arc<KvBlock>]) -> bool {
        let last = |node: &Node| !node.children.iter().any(|child| self.node(*child).block.is_some());
        let candidates = self.nodes.iter().enumerate().filter_map(|(id, node)| {
            let node = node.as_ref()?;
            let block = node.block.as_ref().filter(|_| last(node))?;
            let held = match Arc::strong_count(block) {
                1 => false,
                2 if wanted.iter().any(|wanted| Arc::ptr_eq(wanted, block)) => true,
                _ => return None,
            };
            Some((held, node.used, id))
        });
        let Some((_, _, id)) = candidates.min() else { return false };
        let node = self.node_mut(id);
        node.block = None;
        node.carries.clear();
        node.go_back_to_file();
        self.prune(id);
        true
    }

    /// Removes a node that is nowhere any more, and those before it that it kept.
    fn prune(&mut self, mut id: NodeId) {
        loop {
            let node = self.node(id);
            if node.block.is_some() || node.stored.is_some() || !node.children.is_empty() {
                return;
            }
            let parent = node.parent;
            self.nodes[id] = None;
            self.free.push(id);
            let Some(parent) = parent else {
                self.roots.retain(|root| *root != id);
                return;
            };
            self.node_mut(parent).children.retain(|child| *child != id);
            id = parent;
        }
    }

    /// A file is gone, or was no use.
    pub fn forget_stored(&mut self, key: &Key) {
        for id in 0..self.nodes.len() {
            let Some(node) = self.nodes[id].as_mut() else { continue };
            node.superseded.retain(|(old, _)| old.key != *key);
            if node.stored.take_if(|stored| stored.key == *key).is_some() {
                (node.outdated, node.left_out) = (false, true);
                self.prune(id);
            }
        }
    }

    /// Adds what a store holds: blocks whose parents it holds too.
    pub fn add_stored(&mut self, mut stored: Vec<StoredBlock>) {
        stored.sort_by_key(|block| block.file.first);
        let mut by_key: HashMap<Key, NodeId> = HashMap::new();
        for StoredBlock { file, parent, tokens } in stored {
            let parent = match file.first {
                0 => None,
                _ => match by_key.get(&parent) {
                    Some(id) if self.node(*id).tokens.len() == BLOCK => Some(*id),
                    _ => continue,
                },
            };
            let id = self.add(parent, &tokens);
            debug_assert_eq!(self.node(id).key, file.key, "the reader compared them");
            by_key.insert(file.key, id);
            self.node_mut(id).stored = Some(file);
        }
    }

    /// Blocks in memory that no file has, those of `first` first, and always behind the one that they rest on, without which
    /// they are no use.
    pub fn unsaved(&self, first: &[NodeId]) -> Vec<NodeId> {
        let wants = |id: &NodeId| self.nodes[*id].as_ref().is_some_and(Node::wants_file);
        let stands = |id: &NodeId| wants(id) || self.stored(*id).is_some();
        let mut all: Vec<NodeId> = first.iter().copied().take_while(stands).filter(wants).collect();
        let listed: HashSet<NodeId> = all.iter().copied().collect();
        let mut next: Vec<NodeId> = self.roots.clone();
        while let Some(id) = next.pop() {
            if !stands(&id) {
                continue;
            }
            if wants(&id) && !listed.contains(&id) {
                all.push(id);
            }
            next.extend(&self.node(id).children);
        }
        all
    }

    /// What a file of this block has to say: its own key, that of the block before it, its first position.
    pub fn place(&self, id: NodeId) -> (Key, Key, u64) {
        let mut depth = 0;
        let mut at = self.node(id).parent;
        while let Some(parent) = at {
            depth += 1;
            at = self.node(parent).parent;
        }
        (self.node(id).key, self.parent_key(id), depth * BLOCK as u64)
    }

    /// Whether a block with this key is on disk.
    pub fn is_stored(&self, key: &Key) -> bool {
        self.nodes.iter().flatten().any(|node| node.key == *key && node.stored.is_some())
    }

    /// A block was written; returns the files that it made superfluous.
    pub fn saved(&mut self, id: NodeId, file: Stored) -> Vec<Stored> {
        let node = self.node_mut(id);
        node.stored = Some(file);
        node.outdated = false;
        std::mem::take(&mut node.superseded).into_iter().map(|(old, _)| old).collect()
    }

    /// The nodes of `path` that are still there.
    pub fn present(&self, path: &[NodeId]) -> Vec<NodeId> {
        path.iter().copied().take_while(|id| self.nodes.get(*id).is_some_and(Option::is_some)).collect()
    }
}

impl Node {
    /// Keeps the hidden states of the last places: one where the prompt ended, one where the answer did.
    fn keep_carry(&mut self, at: usize, carry: &[f32]) {
        if self.carries.iter().any(|(place, _)| *place == at) {
            return;
        }
        self.carries.push((at, carry.to_vec()));
        self.carries.sort_by_key(|(place, _)| *place);
        if self.carries.len() > CARRIES {
            self.carries.remove(0);
        }
        // What a file has is older: it is written anew, and until then better than none.
        self.outdated = true;
    }

    /// Whether its block is to be written.
    fn wants_file(&self) -> bool {
        let current = self.stored.is_some() && !self.outdated;
        self.block.is_some() && !current && !self.left_out
    }

    /// Its block is gone. If a file has its first tokens it stands for these again.
    fn go_back_to_file(&mut self) {
        self.outdated = false;
        if self.stored.is_none()
            && self.children.is_empty()
            && let Some((file, len)) = self.superseded.pop()
        {
            self.tokens.truncate(len);
            self.key = file.key;
            self.stored = Some(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_model::{KvDtype, KvLayout, KvParts, KvPool, Snapshot, SnapshotOptions};
    use forebay_testkit::toy;

    use super::*;

    fn pool(blocks: usize) -> Arc<KvPool> {
        let dir = tempfile::tempdir().unwrap();
        toy::write(dir.path()).unwrap();
        let spec = Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap().spec;
        let layout = KvLayout::new(&spec, KvDtype::Bf16, KvParts { index: true, mtp: true }).unwrap();
        KvPool::new(layout, blocks)
    }

    /// Pretends that everything was written that wants to be.
    fn save(tree: &mut Tree) -> Vec<Key> {
        let unsaved = tree.unsaved(&[]);
        let write = |id: &NodeId| {
            let (key, _, first) = tree.place(*id);
            tree.saved(*id, Stored { key, first });
            key
        };
        unsaved.iter().map(write).collect()
    }

    #[test]
    fn what_a_sequence_holds_is_not_given_up_for_nothing() {
        let pool = pool(3);
        let blocks: Vec<_> = (0..3).map(|_| Arc::new(KvPool::take(&pool).unwrap())).collect();
        let mut tree = Tree::default();
        for (at, block) in blocks.iter().enumerate() {
            tree.enter(&[at as u32; 40], std::slice::from_ref(block), None);
        }
        let [first, second, third] = blocks.try_into().unwrap();
        // One sequence holds the first block, and two the third one: none of them is free without the tree.
        drop(second);
        let other = third.clone();
        assert!(tree.evict(&[]));
        assert_eq!([0, 1, 2].map(|at| tree.walk(&[at; 40]).len()), [1, 0, 1]);
        assert!(!tree.evict(&[]));
        // Whoever wants to write to a block that it shares with the tree alone needs no copy.
        assert!(!tree.evict(std::slice::from_ref(&third)));
        assert!(tree.evict(std::slice::from_ref(&first)));
        assert_eq!([0, 1, 2].map(|at| tree.walk(&[at; 40]).len()), [0, 0, 1]);
        drop((first, other));
    }

    /// A block that goes on, or whose last hidden state is known by now, is to be written anew. Until then its file is what
    /// there is when memory has no room for the block.
    #[test]
    fn a_file_stays_known_until_another_one_takes_its_place() {
        let pool = pool(1);
        let tokens: Vec<u32> = (0..50).collect();
        for later in [40, 50] {
            let block = Arc::new(KvPool::take(&pool).unwrap());
            let mut tree = Tree::default();
            tree.enter(&tokens[..40], std::slice::from_ref(&block), None);
            let written = save(&mut tree);
            assert_eq!((written.len(), save(&mut tree).len()), (1, 0));
            tree.enter(&tokens[..later], std::slice::from_ref(&block), Some(&[1.0]));
            assert_eq!(tree.unsaved(&[]).len(), 1, "{later}");
            drop(block);
            assert!(tree.evict(&[]));
            let found = tree.walk(&tokens);
            assert_eq!(found.len(), 1, "{later}");
            let (id, rows) = found[0];
            assert_eq!((rows, tree.stored(id).map(|file| file.key)), (40, Some(written[0])), "{later}");
            assert_eq!(tree.tokens(id), &tokens[..40]);
            assert_eq!(tree.key(Some(id)), key_of(&Key::default(), &tokens[..40]));
        }
    }

    /// A file that made room for others is not written again as long as nobody asks for its block.
    #[test]
    fn files_do_not_take_turns() {
        let pool = pool(1);
        let block = Arc::new(KvPool::take(&pool).unwrap());
        let mut tree = Tree::default();
        tree.enter(&[7; 40], std::slice::from_ref(&block), None);
        let written = save(&mut tree);
        tree.forget_stored(&written[0]);
        assert!(tree.unsaved(&[]).is_empty());
        tree.walk(&[7; 40]);
        assert_eq!(tree.unsaved(&[]).len(), 1);
        // What rests on it is no use without it.
        let tokens: Vec<u32> = (0..BLOCK as u32 + 9).collect();
        let mut tree = Tree::default();
        tree.enter(&tokens[..BLOCK], std::slice::from_ref(&block), None);
        let written = save(&mut tree);
        let path = tree.enter(&tokens, &[block.clone(), block], None);
        tree.forget_stored(&written[0]);
        assert!(tree.unsaved(&path).is_empty());
        tree.walk(&tokens);
        assert_eq!(tree.unsaved(&path), path);
    }
}
