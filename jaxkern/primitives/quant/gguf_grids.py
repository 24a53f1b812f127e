"""The codebooks of the IQ formats: a few hundred points of a grid each, as data.

A point has `width` coordinates, each one of `values`. Its number is that of its digits
(places in `values`) in base len(values), the first digit lowest; a codebook lists its
points by ascending number, so the set of numbers is all there is to store: a bitmap,
lowest bit first, compressed by zlib, in base 85.

The sets are facts of the file format, chosen by the authors of llama.cpp (ggml, MIT
licence) for its 1-, 2- and 3-bit formats; the tests compare every point with the
tables of the `gguf` package.
"""

import base64
import functools
import zlib
from typing import NamedTuple

import numpy as np


class Codebook(NamedTuple):
    """`values` of the coordinates, `width` of them a point, the set of numbers."""

    values: tuple[int, ...]
    width: int
    packed: bytes


@functools.cache
def grid(name: str) -> np.ndarray:
    """The points `[n, width]`, int8, in the order of their codes."""
    values, width, packed = CODEBOOKS[name]
    bitmap = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    numbers = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    digits = numbers[:, None] // len(values) ** np.arange(width) % len(values)
    return np.array(values, np.int8)[digits]


CODEBOOKS = {
    "IQ2_XXS": Codebook(
        (8, 25, 43),
        8,
        b"c-"
        b"nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f"
        b">P^zDolEn6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-"
        b"YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-"
        b"@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st"
        b"5R^Hl2J=^JV`E{Z0D^#$6R7",
    ),
    "IQ2_XS": Codebook(
        (8, 25, 43),
        8,
        b"c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<"
        b"V>X*vo#SY&(-c)w(<-"
        b"fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+"
        b"~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-"
        b"do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-"
        b"pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE"
        b"=SK;cc#9vM%q_=>7msuqjC",
    ),
    "IQ2_S": Codebook(
        (8, 25, 43),
        8,
        b"c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-"
        b"0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAkBEEtarKv-"
        b"X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F"
        b")Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-"
        b"BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC"
        b"|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNE"
        b"lHOf~Fzm+TBn!W(JyjC6",
    ),
    "IQ3_XXS": Codebook(
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        b"c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-"
        b"<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-"
        b"c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx"
        b"{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-"
        b"e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5",
    ),
    "IQ3_S": Codebook(
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        b"c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-"
        b"rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSr"
        b"N(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-"
        b"VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ"
        b"@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-"
        b"wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$I"
        b"B(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>",
    ),
    "IQ1_S": Codebook(
        (-1, 0, 1),
        8,
        b"c-k#eK}(!R7=CxE;dM-"
        b"9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2"
        b"WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2Yw"
        b"J@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-"
        b"XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-"
        b"$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-"
        b"WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64"
        b"F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-"
        b"6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$"
        b")D1%>fQq-"
        b"z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6"
        b"ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-"
        b"rqrtcg6e{stpn$cM#il(dTBx(R&0u-"
        b";P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI"
        b"+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
    ),
}
