"""Run the device functions of gradients_hopper_persistent on a CPU with torch in place of gluon."""
import sys, types, math
import torch
import kda_core_nvidia.gradients_tiles as gt, kda_core_nvidia.gradients_decays as gd
import kda_core_nvidia.gradients_persistent_tiles as pt, kda_core_nvidia.gradients_persistent_far as pf
import kda_core_nvidia.gradients_hopper_persistent as gp
BF=torch.bfloat16
class X(torch.Tensor):
    @staticmethod
    def __new__(cls,t): return torch.Tensor._make_subclass(cls,t)
    def to(self,dt=None,bitcast=False):
        if bitcast: return self
        return X(super().to(dt).as_subclass(torch.Tensor))
    @property
    def type(self): return types.SimpleNamespace(layout=None)
    def permute(self,*d): return X(torch.Tensor.permute(self.as_subclass(torch.Tensor),*d))
def plain(x): return x.as_subclass(torch.Tensor) if isinstance(x,torch.Tensor) else x
class Buf:
    def __init__(s,t): s.t=t
    def slice(s,a,n,dim=0): return Buf(s.t.narrow(dim,a,n))
    def index(s,i): return Buf(s.t[i])
    def permute(s,d): return Buf(s.t.permute(d))
    def load(s,l=None): return X(s.t.clone())
    def store(s,x): s.t.copy_(plain(x))
class GL: pass
gl=GL()
gl.constexpr=lambda x=None:x
gl.float32,gl.bfloat16,gl.int32=torch.float32,BF,torch.int32
gl.static_range=range
gl.full=lambda sh,v,dt=torch.float32,l=None:X(torch.full(sh,v,dtype=dt))
gl.arange=lambda a,b,layout=None:X(torch.arange(a,b))
gl.expand_dims=lambda x,d:X(plain(x).unsqueeze(d))
gl.where=lambda c,a,b:X(torch.where(plain(c),plain(a) if isinstance(a,torch.Tensor) else torch.tensor(a),plain(b) if isinstance(b,torch.Tensor) else torch.tensor(b)))
gl.sum=lambda x,axis:X(plain(x).sum(axis))
gl.maximum=lambda a,b,propagate_nan=None:X(torch.maximum(plain(a),torch.as_tensor(float(b)) if not isinstance(b,torch.Tensor) else plain(b)))
gl.minimum=lambda a,b,propagate_nan=None:X(torch.minimum(plain(a),torch.as_tensor(float(b)) if not isinstance(b,torch.Tensor) else plain(b)))
gl.convert_layout=lambda x,l,assert_trivial=False:x
gl.SliceLayout=gl.DotOperandLayout=lambda *a:None
gl.join=lambda a,b:X(torch.stack([plain(a),plain(b)],-1))
def mma_v2(a,b,c): return X((plain(a).double()@plain(b).double()+plain(c).double()).float())
def left_parts(x):
    h=plain(x).to(BF).float(); return X(h.to(BF)),X((plain(x)-h).to(BF))
exp2=lambda x:X(torch.exp2(plain(x)))
rec=lambda x:X(1/plain(x))
def softplus(z): 
    z=plain(z).double(); return X((torch.clamp(z,min=0)+torch.log1p(torch.exp2(-z.abs()))*math.log2(math.e)).float())
def halves_of(x,C,l):
    x=plain(x); return X(x[:,:C//2]),X(x[:,C//2:])
def last_row(x): return X(plain(x)[:,15])
rep=dict(gl=gl,mma_v2=mma_v2,left_parts=left_parts,exp2=exp2,reciprocal=rec,softplus=softplus,halves_of=halves_of,last_row=last_row,
  LOG2_E=math.log2(math.e),FLOOR=-160.0,PROPAGATE=None,TILES=4,WARPS=8,in_order=lambda:None,
  RIGHT=None,TILE=None,BY_CHANNEL=None,BY_ROW=None,M32=None,M64=None,BOUNDED_LOG2_DECAY=-5*math.log2(math.e))
collected={}
def with_sums(found,new,t): return ((t,new),)+found
def sums_of_threads(x): return X(plain(x).sum(1,keepdim=True))
names=["rows_of_tile","numbers_of_rows","log2_decays","selected_sums","add_product","rows_by_columns","columns_by_rows","add_sums","add_level","rows_of","numbers_of","tiles_of","tiles_of_stacked","add_columns","add_rows","own_gradients","_tile","_product","far_gradients_of_pair","_near_gradients_of_pair"]
for m in (gt,gd,pt,pf,gp):
    for n in names:
        f=getattr(m,n,None)
        if f is not None and hasattr(f,"fn"): setattr(m,n,f.fn)
    for n,v in rep.items():
        if hasattr(m,n): setattr(m,n,v)
    for n,v in dict(with_sums=with_sums,sums_of_threads=sums_of_threads,_by_warp=lambda x:X(plain(x).sum(0))).items():
        if hasattr(m,n): setattr(m,n,v)

def run(strength, gate="softplus", seed=0, mild_tiles=()):
    torch.manual_seed(seed)
    q,k=(torch.randn(64,128).to(BF) for _ in range(2))
    g=(torch.randn(64,128)).to(BF)
    if gate=="none":
        g=(-strength*(torch.rand(64,128) if strength>0 else torch.full((64,128),-1.0))).to(BF)
    A=torch.tensor(strength); bias=torch.rand(128)*(gate=="softplus")*(gate=="softplus")
    S=torch.randn(128,128)*.1; dS=torch.randn(128,128)*.1
    do=torch.randn(64,128); dv=torch.randn(64,128); z=torch.randn(64,128)
    rows=X(S.T@torch.cat([do,dv]).T)        # [K,128]
    columns=X(dS.T@z.T)                      # [K,64]
    m=torch.cat([do,dv])@z.T                 # [128,64]
    own=torch.cat([m[:64].diag(),m[64:].diag()])
    mask=torch.arange(64)[None]<(torch.arange(128)%64)[:,None]
    mm=(m*mask).to(BF)
    pairs=torch.zeros(32,16,16,dtype=BF)
    for c in range(4):
        for t in range(4):
            pairs[8*c+t]=mm[16*t:16*t+16,16*c:16*c+16]; pairs[8*c+4+t]=mm[64+16*t:64+16*t+16,16*c:16*c+16]
    nq,nk=1/q.float().norm(dim=1),1/k.float().norm(dim=1); beta=torch.rand(64); scale=.088
    numbers=torch.cat([nk*beta,nq*scale,nk,torch.zeros(64)])
    B=lambda t:Buf(t)
    g_rows,q_rows,k_rows=B(g),B(q),B(k)
    pr=B(pairs); nb=B(numbers); ow=B(own)
    rate=A; o_scale=1.25
    biasx=X(bias[:,None])
    if gate=="softplus": ylog=-(torch.nn.functional.softplus(g.double()+bias.double())*A.double())*math.log2(math.e)
    else: ylog=g.double()*math.log2(math.e)
    ylog=ylog.clamp(min=-160)
    G=ylog.cumsum(0)  # [64,K]
    total=G[-1]
    sums=X(((S.double()*dS.double()).sum(0)*torch.exp2(total)*o_scale).float())
    # exact
    E=lambda a:torch.exp2(a)
    kb=k.double()*(nk*beta).double()[:,None]; qh=q.double()*(nq*scale).double()[:,None]; kr=-k.double()*nk.double()[:,None]
    W=torch.zeros(64,64,128,dtype=torch.float64)  # decay s->r
    for r in range(64):
        W[r,:r]=E(G[r]-G[:r])
    mmd=mm.double()
    Aq=E(G)*rows[:,:64].double().T+torch.einsum("rs,rsc,sc->rc",mmd[:64],W,kb)
    Ak=E(G)*rows[:,64:].double().T+torch.einsum("rs,rsc,sc->rc",mmd[64:],W,kb)
    Z=o_scale*E(total-G)*columns.double().T+torch.einsum("rs,rsc,rc->sc",mmd[:64],W,qh)+torch.einsum("rs,rsc,rc->sc",mmd[64:],W,kr)
    # dg: everything that straddles t
    Sq=E(G)*(qh*rows[:,:64].double().T+kr*rows[:,64:].double().T)
    dSc=o_scale*E(total-G)*columns.double().T*kb
    dg=torch.zeros(64,128,dtype=torch.float64)
    P=torch.einsum("rs,rsc,sc,rc->rsc",mmd[:64],W,kb,qh)+torch.einsum("rs,rsc,sc,rc->rsc",mmd[64:],W,kb,kr)
    for t in range(64):
        dg[t]=sums.double()+Sq[t:].sum(0)+dSc[:t].sum(0)+P[t:,:t].sum((0,1))
    ownq=(nq*scale).double()*own[:64].double(); 
    dq=Aq*(nq*scale).double()[:,None]+k.double()*(ownq*(nk*beta).double())[:,None]
    dkc=Z+q.double()*ownq[:,None]
    dk=Ak*-nk.double()[:,None]+(nk*beta).double()[:,None]*dkc
    ex=dict(q=dq,k=dk,g=dg,sq=(q*dq).sum(1),sk=(k*dk).sum(1),sb=(k*dkc).sum(1))
    halves=[];rise=[]
    for t in range(4):
        y=gt.log2_decays(g_rows,biasx,rate,-5.0,None,t,gate,False,None)
        s_,t_=torch.arange(16)[:,None],torch.arange(16)[None]
        x=gt.selected_sums(y,X(s_<=t_),(0.5,-0.5),X(torch.zeros(128,16)))
        halves.append(last_row(x)); rise.append(exp2(x))
    far=[Buf(torch.full((32,128),float("nan"))) for _ in range(6)]; high=[Buf(torch.full((16,128),float("nan"))) for _ in range(2)]
    out={}
    out["far"]=pf.far_gradients_of_pair(rows,columns,sums,tuple(halves),biasx,rate,-5.0,o_scale,g_rows,q_rows,k_rows,nb,ow,pr,far[:2],far[2:4],far[4:],high,gate)
    out["near"]=gp._near_gradients_of_pair(rows,columns,sums,tuple(rise),tuple(halves),o_scale,q_rows,k_rows,nb,ow,pr)
    least=min(float(h.min()) for h in halves)
    for n,o in out.items():
        f=dict(q=torch.cat([plain(x).T for x in o[0]]),k=torch.cat([plain(x).T for x in o[1]]),g=torch.cat([plain(x).T for x in o[2]]))
        for i,nm in ((3,"sq"),(4,"sk"),(5,"sb")):
            d=dict(o[i]); f[nm]=torch.cat([plain(d[t]) for t in range(4)])
        print(f"{gate} {strength} half {least:.0f} {n:5s}"," ".join(f"{a} {float((f[a].double()-ex[a]).norm()/ex[a].norm()):.1e}" for a in ex))
if __name__=="__main__":
    for st in (2.,14.,40.,-4.0,-5.,-5.4,-6.,-7,-8,-14): run(st,"none")
